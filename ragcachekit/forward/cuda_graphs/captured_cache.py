"""The cache of captured linked forwards: tables instead of tensors tell where rows go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.forward.tagged_keys import tag_of, tagged, untagged
from ragcachekit_kernels import dispatch


class NotCapturable(Exception):
    """This model's linked forward cannot be captured, or this request does not fit a captured one."""


@dataclass(frozen=True, eq=False)
class CapturedRows:
    """What attention reads in one layer of a captured forward.

    Attributes
    ----------
    table : dispatch.KVTable
        Addresses of the request's keys and values.
    layer : int
        Index into the table.
    rows : dispatch.DeviceRows
    tokens : int
        Approximate number of keys; affects only the speed.
    key, value : torch.Tensor
        The layer's new rows ``[1, kv_heads, room, head_dim]``, which stand in for the whole KV. Attention
        must get these very tensors: the table does not cover what a model computes from them.
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


def new_captured_cache(layers: int, table: dispatch.KVTable, rows: dispatch.DeviceRows, tokens: int) -> Cache:
    """A cache of :class:`CapturedLayer`; the same one serves every request of a captured forward."""
    return Cache(layers=[CapturedLayer(index, table, rows, tokens) for index in range(layers)])


def captured_rows(keys: torch.Tensor) -> CapturedRows | None:
    """The rows that a :class:`CapturedLayer` tagged ``keys`` with, or None."""
    tag = tag_of(keys)
    return tag if isinstance(tag, CapturedRows) else None


def _same(given: torch.Tensor, own: torch.Tensor) -> bool:
    return given.data_ptr() == own.data_ptr() and given.shape == own.shape and given.stride() == own.stride()
