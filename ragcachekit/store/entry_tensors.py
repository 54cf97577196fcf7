"""From the raw bytes of an entry to its tensors, without copying."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragcachekit.store.entry_header import LayerSpec, TensorSpec


def split(
    raw: torch.Tensor, specs: tuple[LayerSpec, ...]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Keys and values of the layers that lie in ``raw`` one behind the other."""
    kind = specs[0].keys
    # Layers that are alike share their specs, so most of this compares objects with themselves.
    if kind == specs[0].values and all(layer[:2] == specs[0][:2] for layer in specs):
        # As of almost every model: all tensors in one step, not three for each.
        every = as_tensor(raw, TensorSpec(kind.dtype, (2 * len(specs), *kind.shape))).unbind()
        return every[::2], every[1::2]
    keys, values, at = [], [], 0
    for layer in specs:
        middle, behind = at + layer.keys.nbytes, at + layer.nbytes
        keys.append(as_tensor(raw[at:middle], layer.keys))
        values.append(as_tensor(raw[middle:behind], layer.values))
        at = behind
    return keys, values


def as_tensor(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """One tensor from its bytes."""
    if raw.data_ptr() % spec.dtype.itemsize:
        raw = raw.clone()  # a wider type behind an odd number of narrower ones
    return raw.view(spec.dtype).reshape(spec.shape)
