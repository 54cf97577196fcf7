"""The cache and inputs of captured linked forwards: a table has the addresses of each request's KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ragcachekit.forward.tagged_keys import tagged, untagged
from ragcachekit_kernels import dispatch


class NotCapturable(Exception):
    """This model's linked forward cannot be captured, or this request does not fit a captured one."""


@dataclass(frozen=True, eq=False)
class CapturedRows:
    """What attention reads in one layer of a captured forward.

    ``table`` has the addresses of the request's KV; ``tokens``, about its length, affects only the speed.
    ``key`` and ``value`` are the new rows ``[1, kv_heads, room, head_dim]``, which stand in for the whole KV.
    Attention must get these very tensors: the table does not cover what a model computes from them.
    """

    table: dispatch.KVTable
    layer: int
    rows: dispatch.DeviceRows
    tokens: int
    key: torch.Tensor
    value: torch.Tensor

    def check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise :class:`NotCapturable` unless attention is over the cached keys and values as they are."""
        if not (_same(untagged(key), self.key) and _same(value, self.value)):
            raise NotCapturable("its attention does not read the cached keys and values as they are")
        if query.shape[2] != self.rows.room:
            raise NotCapturable("its layers do not all run the same rows")


class CapturedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer: scatters rows to the addresses in the table, and stores nothing."""

    def __init__(self, layer: int, table: dispatch.KVTable, rows: dispatch.DeviceRows, tokens: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._layer, self._table, self._rows, self._tokens = layer, table, rows, tokens

    def get_seq_length(self) -> int:
        """Not zero, and the same for every request."""
        return 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No mask, as in :class:`~ragcachekit.forward.cache.LinkedLayer`."""
        return 0, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter the rows, and return them tagged with :class:`CapturedRows`."""
        if key_states.shape[0] != 1 or key_states.shape[2] != self._rows.room:
            raise NotCapturable("its layers do not all run the same rows")
        key, value = untagged(key_states), untagged(value_states)
        dispatch.scatter_at(key[0], value[0], self._table, self._layer, self._rows)
        rows = CapturedRows(self._table, self._layer, self._rows, self._tokens, key, value)
        return tagged(key, rows), value


def _same(given: torch.Tensor, own: torch.Tensor) -> bool:
    return given.data_ptr() == own.data_ptr() and given.shape == own.shape and given.stride() == own.stride()


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

    ``input_ids`` and ``position_ids`` are ``[1, room]`` int64, ``last`` ``[1]`` the index of the last row.
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
