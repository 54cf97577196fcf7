"""Entries in page-locked memory: a few slabs each, in which every layer is contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from ragcachekit.model.kv import SCALE_OF_KEYS, SCALE_OF_VALUES, ChunkKV
from ragcachekit.model.tensor_block import carved, offsets

_WASTE = 16
"""A slab is divided if rounding it up would waste more than this part of it."""


def page_locked(nbytes: int) -> torch.Tensor:
    """Memory from torch's host allocator, which takes :func:`taken` bytes and caches them when freed."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def taken(nbytes: int) -> int:
    """Bytes that torch's host allocator takes for so many: the next power of two.

    It rounds less where ``PYTORCH_ALLOC_CONF`` sets ``pinned_max_round_threshold_mb``: then this is too much.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def slabs(sizes: Sequence[int]) -> list[int]:
    """Number of layers per slab, for consecutive layers of these sizes.

    An entry a little larger than a power of two would take twice its bytes in one slab. The layers that fill
    the lower power of two get one slab, and the rest another.
    """
    ends = list(accumulate(sizes))
    whole = taken(ends[-1])
    fit = sum(end <= whole // 2 for end in ends)
    if fit and whole - ends[-1] > ends[-1] // _WASTE:
        rest = slabs(sizes[fit:])
        if taken(ends[fit - 1]) + _taken_by(sizes[fit:], rest) < whole:
            return [fit, *rest]
    return [len(sizes)]


def taken_by(kv: ChunkKV) -> int:
    """Bytes that an entry takes, once it is :func:`in_slabs`."""
    sizes = [offsets(shapes)[-1] for shapes in kv.stored_shapes]
    stored = sum(t.nbytes for layer in range(kv.layers) for t in kv.stored_layer(layer))
    return _taken_by(sizes, slabs(sizes)) + kv.nbytes - stored  # sums stay where they are


def in_slabs(kv: ChunkKV) -> ChunkKV:
    """A copy in page-locked memory with contiguous layers (:attr:`ChunkKV.stretches`)."""
    shapes = kv.stored_shapes
    sizes = [offsets(specs)[-1] for specs in shapes]
    layers, first = list[list[torch.Tensor]](), 0
    for count in slabs(sizes):
        slab, at = page_locked(sum(sizes[first : first + count])), 0
        for layer in range(first, first + count):
            layers.append(carved(slab[at : at + sizes[layer]], shapes[layer]))
            for into, source in zip(layers[layer], kv.stored_layer(layer), strict=True):
                into.copy_(source)
            at += sizes[layer]
        first += count
    keys, values, *scales = zip(*layers, strict=True)
    sums = dict(kv.sums)
    for name, tensors in zip((SCALE_OF_KEYS, SCALE_OF_VALUES), scales, strict=False):
        sums |= {f"{name}{layer}": scale for layer, scale in enumerate(tensors)}
    return replace(kv, keys=keys, values=values, sums=sums)


def give_back(spare: int) -> None:
    """Free torch's cached page-locked memory if it is more than ``spare`` bytes; waits for the GPU."""
    stats = torch.cuda.host_memory_stats()
    kept = stats.get("allocated_bytes.current", 0)
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is not None and kept - stats.get("active_bytes.current", kept) > spare:
        empty()


def _taken_by(sizes: Sequence[int], counts: Sequence[int]) -> int:
    ends = list(accumulate(counts))
    begins = [end - count for end, count in zip(ends, counts, strict=True)]
    return sum(taken(sum(sizes[begin:end])) for begin, end in zip(begins, ends, strict=True))
