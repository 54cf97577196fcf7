"""KV in memory of its own: a view keeps the whole storage alive."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from ragcachekit.model.kv import ChunkKV

_WASTE = 8
"""A tensor is copied if more than 1/8 of the storage that it keeps alive is not the entry's."""


def in_own_memory(kv: ChunkKV) -> tuple[ChunkKV, int]:
    """``kv``, copied where its tensors keep much more memory alive than they use, and its bytes of memory.

    At least its ``nbytes``: tensors that share memory do not once they are copied.
    """
    held: dict[int, int] = {}
    used: Counter[int] = Counter()
    tensors = (*kv.keys, *kv.values, *kv.sums.values())
    for tensor in tensors:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        used[storage.data_ptr()] += tensor.nbytes
    wasteful = {at for at, nbytes in held.items() if nbytes > used[at] + used[at] // _WASTE}
    if not wasteful:
        return kv, max(kv.nbytes, sum(held.values()))

    def own(tensor: torch.Tensor) -> torch.Tensor:
        shared = tensor.untyped_storage().data_ptr() in wasteful
        return tensor.clone(memory_format=torch.contiguous_format) if shared else tensor

    sums = {name: own(tensor) for name, tensor in kv.sums.items()}
    kv = replace(kv, keys=tuple(map(own, kv.keys)), values=tuple(map(own, kv.values)), sums=sums)
    return kv, sum(held[at] for at in held.keys() - wasteful) + sum(used[at] for at in wasteful)
