"""The cache that a linked forward is captured with: it says where rows go by tables, not by tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.forward.tagged_keys import tag_of, tagged, untagged
from ragcachekit_kernels import dispatch


class NotCapturable(Exception):
    """This model's linked forward cannot be captured, or this request cannot go through a captured one."""


@dataclass(frozen=True, eq=False)
class CapturedRows:
    """What attention needs to know about one layer of a captured forward.

    Attributes
    ----------
    table : dispatch.KVTable
        Where the request's keys and values lie.
    layer : int
        Which of the table's entries.
    rows : dispatch.DeviceRows
    tokens : int
        About how many keys there are; only the speed depends on it.
    key, value : torch.Tensor
        What the layer's ``update`` was given, and gave back: ``[1, kv_heads, room, head_dim]``. Stand-ins;
        attention must get these very tensors, for what a model makes of them is not in the table.
    """

    table: dispatch.KVTable
    layer: int
    rows: dispatch.DeviceRows
    tokens: int
    key: torch.Tensor
    value: torch.Tensor

    def check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Refuse attention over anything but the cached keys and values as they are.

        Raises
        ------
        NotCapturable
        """
        if not (_same(untagged(key), self.key) and _same(value, self.value)):
            raise NotCapturable("its attention does not read the cached keys and values as they are")
        if query.shape[2] != self.rows.room:
            raise NotCapturable("its layers do not all run the same rows")


class CapturedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer: scatters the rows to where the table says, and keeps nothing."""

    def __init__(self, layer: int, table: dispatch.KVTable, rows: dispatch.DeviceRows, tokens: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._layer, self._table, self._rows, self._tokens = layer, table, rows, tokens

    def get_seq_length(self) -> int:
        """Something is kept; how much differs from request to request."""
        return 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of a linked layer: no mask is made."""
        return 0, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter; attention gets the rows themselves as stand-ins, marked with where the KV lies."""
        if key_states.shape[0] != 1 or key_states.shape[2] != self._rows.room:
            raise NotCapturable("its layers do not all run the same rows")
        key, value = untagged(key_states), untagged(value_states)
        dispatch.scatter_at(key[0], value[0], self._table, self._layer, self._rows)
        mark = CapturedRows(self._table, self._layer, self._rows, self._tokens, key, value)
        return tagged(key, mark), value


class CapturedCache(Cache):  # type: ignore[misc]
    """A cache of :class:`CapturedLayer`; the same one serves every request of a captured forward."""

    def __init__(self, layers: int, table: dispatch.KVTable, rows: dispatch.DeviceRows, tokens: int) -> None:
        super().__init__(layers=[CapturedLayer(index, table, rows, tokens) for index in range(layers)])


def captured_rows(keys: torch.Tensor) -> CapturedRows | None:
    """The rows that a layer of :class:`CapturedCache` marked ``keys`` with, or None."""
    mark = tag_of(keys)
    return mark if isinstance(mark, CapturedRows) else None


def _same(given: torch.Tensor, own: torch.Tensor) -> bool:
    return given.data_ptr() == own.data_ptr() and given.shape == own.shape and given.stride() == own.stride()
