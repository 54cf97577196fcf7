"""Blocks of memory that hold many tensors: one allocation, and one copy moves them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

TensorShape = tuple[torch.dtype, tuple[int, ...]]

ALIGN = 256  # bytes; what torch's own allocations begin at is enough for every kernel


def nbytes_of(side: TensorShape) -> int:
    """Bytes of one contiguous tensor ``[heads, tokens, dim]``."""
    dtype, (heads, tokens, dim) = side
    return heads * tokens * dim * dtype.itemsize


def offsets(sides: Sequence[TensorShape]) -> list[int]:
    """Byte offset of each tensor in its block; last the size of the block."""
    out = [0]
    for side in sides:
        out.append(out[-1] + -(-nbytes_of(side) // ALIGN) * ALIGN)
    return out


def stretch(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One uint8 view of all tensors if they are adjacent as in :func:`carved`, else None."""
    first = tensors[0]
    at = [first.data_ptr() + offset for offset in offsets([(t.dtype, tuple(t.shape)) for t in tensors])]
    if any(t.data_ptr() != begin or not t.is_contiguous() for t, begin in zip(tensors, at[:-1], strict=True)):
        return None
    storage = first.untyped_storage()
    if any(t.untyped_storage().data_ptr() != storage.data_ptr() for t in tensors):
        return None  # neighbours by chance
    nbytes = at[-2] - at[0] + tensors[-1].nbytes
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    return whole.set_(storage, first.storage_offset() * first.element_size(), (nbytes,), (1,))


def carved(memory: torch.Tensor, sides: Sequence[TensorShape]) -> list[torch.Tensor]:
    """Views of uint8 ``memory`` at :func:`offsets`."""
    typed = {dtype: memory.view(dtype) for dtype in {dtype for dtype, _ in sides}}
    first = memory.storage_offset()

    def carve(side: TensorShape, offset: int) -> torch.Tensor:
        dtype, (heads, tokens, dim) = side
        at = (first + offset) // dtype.itemsize
        return typed[dtype].as_strided((heads, tokens, dim), (tokens * dim, dim, 1), at)

    return [carve(side, offset) for side, offset in zip(sides, offsets(sides)[:-1], strict=True)]
