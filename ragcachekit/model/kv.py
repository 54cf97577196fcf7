"""Chunk KV: the type that encoders return, stores hold and the linker places."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

TensorShape = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of one tensor."""


def nbytes_of(spec: TensorShape) -> int:
    """Bytes of a tensor of this dtype and shape."""
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


SCALE_OF_KEYS, SCALE_OF_VALUES = "scale.k.", "scale.v."
"""Prefixes in ``sums`` of a layer's scales: of keys ``[heads, 1, dim]``, of values ``[heads, tokens, 1]``."""

SENSITIVITY = "sensitivity"
"""Name in ``sums`` of ``[layers, tokens]``: how far values move between two encodings of a chunk."""

PER_TOKEN = frozenset({"attended", "outward", SENSITIVITY})
"""Names in ``sums`` of tensors whose last dimension are the chunk's tokens."""

TOKEN_IDS = "token_ids"
"""Name in ``sums`` of the ids of the chunk's tokens after all that it was encoded after."""


def token_ids_of(sums: Mapping[str, torch.Tensor]) -> tuple[int, ...] | None:
    """The :data:`TOKEN_IDS`, None where they were not recorded."""
    return tuple(map(int, sums[TOKEN_IDS].tolist())) if TOKEN_IDS in sums else None


def with_token_ids(kv: ChunkKV, token_ids: Sequence[int]) -> ChunkKV:
    """The KV with its :data:`TOKEN_IDS`, in the dtype of all sums, which is exact below 2^24."""
    ids = torch.tensor(token_ids, dtype=torch.float32)
    return ChunkKV.checked(kv.keys, kv.values, kv.start, {**kv.sums, TOKEN_IDS: ids}, kv.quantised)


def is_packed(sums: Mapping[str, torch.Tensor]) -> bool:
    """Whether KV with these ``sums`` is in eight bits (:mod:`ragcachekit.store.quantised`)."""
    return f"{SCALE_OF_KEYS}0" in sums


def scales_of(sums: Mapping[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, ...]:
    """Scales of a layer's keys and values; empty unless they are in eight bits."""
    if not is_packed(sums):
        return ()
    return sums[f"{SCALE_OF_KEYS}{layer}"], sums[f"{SCALE_OF_VALUES}{layer}"]


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """Keys and values of one chunk, layer by layer; shared and never written to.

    - ``keys``, ``values``: One tensor per layer, shape ``[kv_heads, tokens, head_dim]``; keys after any q/k
      norm.
    - ``start``: None: keys without RoPE (and without the attention scaling m of YaRN/longrope), for any
      position. An int: keys as the model rotated them from that position on (exact prefixes).
    - ``sums``: Attention summed while the chunk was encoded, float32; may be empty. ``attended``
      ``[tokens]``: attention to each token from the chunk's own rows, over layers, heads and rows. For
      ``in-prompt`` KV, over heads and rows of the chunk: ``inter`` ``[layers, segments]``, attention to each
      segment before it; ``intra`` ``[layers]``, attention to itself; ``outward`` ``[tokens]``, attention of
      each token to segments before, mean over layers; ``behind`` ``[segments]``, tokens of these segments.
      For ``similar:n`` KV, ``sensitivity`` ``[layers, tokens]``: the norm of the difference between a token's
      values and those after the system text alone. ``token_ids``: what ``forget`` looks for texts in.
    - ``quantised``: ``int8`` or ``fp8`` if rounded to that in some tier, and so never exact; else empty.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    start: int | None = None
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    quantised: str = ""

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or not self.keys:
            raise ValueError("keys and values need the same, non-zero number of layers")
        tokens = {t.shape[1] for t in (*self.keys, *self.values)}
        if len(tokens) != 1 or any(t.dim() != 3 for t in (*self.keys, *self.values)):
            raise ValueError(
                "every layer must be [kv_heads, tokens, head_dim] with the same number of tokens"
            )

    @classmethod
    def checked(
        cls,
        keys: tuple[torch.Tensor, ...],
        values: tuple[torch.Tensor, ...],
        start: int | None,
        sums: Mapping[str, torch.Tensor],
        quantised: str,
    ) -> ChunkKV:
        """Construct without validation, which takes a tenth of a small read."""
        made = object.__new__(cls)
        made.__dict__.update(keys=keys, values=values, start=start, sums=sums, quantised=quantised)
        return made

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ChunkKV:
        """Apply ``change`` to every key, value and scale tensor; other ``sums`` stay."""
        kv, scales = self.unpacked(), (SCALE_OF_KEYS, SCALE_OF_VALUES)
        sums = {name: change(t) if name.startswith(scales) else t for name, t in kv.sums.items()}
        keys, values = tuple(map(change, kv.keys)), tuple(map(change, kv.values))
        return replace(kv, keys=keys, values=values, sums=sums)

    def to(self, device: str | torch.device) -> ChunkKV:
        """Unpacked KV with keys and values on ``device``; no copy if they are there."""
        device, kv = torch.device(device), self.unpacked()
        devices = {tensor.device for tensor in (*kv.keys, *kv.values)}
        if all(at == device or (at.type == device.type and device.index is None) for at in devices):
            return kv
        return kv.each(lambda tensor: tensor.to(device))

    def unpacked(self) -> ChunkKV:
        """Self; a :class:`~ragcachekit.store.quantised.PackedKV` returns an ordinary ChunkKV."""
        return self

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[1]

    @property
    def layers(self) -> int:
        return len(self.keys)

    @cached_property
    def shapes(self) -> tuple[tuple[TensorShape, TensorShape], ...]:
        """Dtype and shape of keys and of values, per layer."""
        return tuple(
            ((keys.dtype, tuple(keys.shape)), (values.dtype, tuple(values.shape)))
            for keys, values in zip(self.keys, self.values, strict=True)
        )

    def stored_layer(self, number: int) -> tuple[torch.Tensor, ...]:
        """Keys and values of one layer as stored, followed by their scales if in eight bits."""
        return self.keys[number], self.values[number], *scales_of(self.sums, number)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (*self.keys, *self.values, *self.sums.values()))
