"""The memory that a captured forward reads: each request's rows and addresses are written into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragcachekit_kernels import dispatch

ENTRY = 4
"""Words per layer: address of the keys, of the values, elements between two KV heads of either."""

SMALLEST, FINE, STEP, COARSE = 16, 512, 64, 128
FEW_ROWS, FEW_TOKENS = 256, 2048


def room_for(rows: int) -> int:
    """Rows that the forward is captured with for a request of so many.

    Powers of two up to 64, multiples of 64 up to 512, then of 128. Matrix kernels tile rows by these sizes;
    larger steps would compute up to a third of the rows in vain.
    """
    if rows <= STEP:
        return max(SMALLEST, 1 << (rows - 1).bit_length())
    step = STEP if rows <= FINE else COARSE
    return -(-rows // step) * step


def tokens_for(room: int, slots: int) -> int:
    """Keys that attention over ``room`` rows is captured for, of a request with so many slots.

    Few rows use the whole GPU only if their keys are split, by their number: 2048, 8192, 32768, ... This
    affects the speed alone, not the result.
    """
    tokens = FEW_TOKENS
    while tokens < slots and room <= FEW_ROWS:
        tokens *= 4
    return tokens


class GraphInputs:
    """Inputs of one captured forward over ``room`` rows (an even number), at fixed addresses.

    Attributes
    ----------
    input_ids, position_ids : torch.Tensor
        ``[1, room]`` int64; columns after the last row are not read.
    last : torch.Tensor
        ``[1]`` int64: index of the last row.
    rows : dispatch.DeviceRows
    table : dispatch.KVTable
    """

    def __init__(self, room: int, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.room = room
        self.input_ids = torch.zeros(1, room, dtype=torch.int64, device=device)
        self.position_ids = torch.zeros_like(self.input_ids)
        # One block of memory, so that one copy brings all numbers of a request.
        self._words = [room // 2, ENTRY * layers, 1, 1]
        self._block = torch.zeros(sum(self._words), dtype=torch.int64, device=device)
        positions, entries, self.last, count = torch.split(self._block, self._words)
        self.rows = dispatch.DeviceRows(positions.view(torch.int32), count.view(torch.int32)[:1])
        self.table = dispatch.KVTable(entries.view(layers, ENTRY), dtype)
        self._every = torch.arange(room, device=device)

    def write(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        positions: Sequence[int],
        entries: Sequence[int],
    ) -> None:
        """Enqueue a request: device ids and positions ``[1, rows]``, host positions and table words."""
        rows = len(positions)
        self.input_ids[:, :rows].copy_(input_ids, non_blocking=True)
        self.position_ids[:, :rows].copy_(position_ids, non_blocking=True)
        # Not reused by us: torch recycles page-locked memory when copies from it are done.
        pinned = self._block.device.type == "cuda"
        block = torch.empty(sum(self._words), dtype=torch.int64, pin_memory=pinned)
        into, words, last, count = torch.split(block, self._words)
        into.view(torch.int32).copy_(torch.tensor([*positions, *[positions[-1]] * (self.room - rows)]))
        words.copy_(torch.tensor(entries))
        last.fill_(rows - 1)
        count.fill_(rows)
        self._block.copy_(block, non_blocking=True)

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions ``[1, room]``, the last row's repeated; part of what is captured."""
        at = torch.minimum(self._every, self.last)
        return self.input_ids[:, at], self.position_ids[:, at]
