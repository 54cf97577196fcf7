"""The transformers cache of a linked prompt: scatters during the prefill, appends afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.forward.tagged_keys import tagged
from ragcachekit.policies.base import AttentionObserver
from ragcachekit.store.base import Pair
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import AttentionOptions

MakeLayer = Callable[[], Pair]
"""Gives one layer's keys and values ``[1, kv_heads, slots, head_dim]`` with every kept row in its place.

While layer 0 computes, later layers may still be read from a slow tier; ``LoadFailed`` if that fails.
"""

BeforeLayer = Callable[[int, torch.nn.Module, Any, Any], Any]
"""Takes a decoder layer's number, the layer, its args and kwargs; returns new ``(args, kwargs)`` or None."""


class Projected(Exception):
    """Raised instead of attending when only a layer's K and V are needed."""


@dataclass(frozen=True)
class LinkRows:
    """Rows that one linked forward computes; all layers share one copy of their positions on the device."""

    positions: dispatch.Rows
    observer: AttentionObserver | None = None

    @classmethod
    def of(cls, positions: Sequence[int], observer: AttentionObserver | None = None) -> LinkRows:
        """Rows at ascending ``positions``."""
        return cls(dispatch.Rows(tuple(positions)), observer)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Row i over the keys up to its position; see :class:`~ragcachekit.forward.tagged_keys.KeyTag`."""
        positions: Sequence[int] = self.positions
        if len(positions) > query.shape[2]:
            # Gemma 4 runs its last layers, which share KV of earlier ones, for the last row alone.
            positions = positions[-query.shape[2] :]
        if self.observer is not None:
            self.observer.observe(layer, query[0], key[0], positions, options)
        out = dispatch.sparse_attention(query[0], key[0], value[0], positions, options)
        return out.transpose(0, 1).contiguous()[None]


class LinkedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a linked prompt.

    Until its first ``update`` it reports only the kept rows, so that generate feeds exactly the rows to
    compute; that update scatters them to their positions. Then it is an ordinary dynamic layer, sorted by
    position. Never a sliding layer: masks come from positions, and no kept row may be dropped.

    ``slots`` columns of what ``make`` gives belong to this prompt. ``rows`` are those still to be scattered,
    ``kept`` is the length to report until then.
    """

    def __init__(
        self,
        make: MakeLayer,
        dtype: torch.dtype,
        device: torch.device,
        slots: int,
        rows: LinkRows | None,
        kept: int,
    ) -> None:
        self._make: MakeLayer | None = None
        self._keys: Any = None
        self._values: Any = None
        super().__init__()
        self._make, self._slots = make, slots
        self.settling = 0.0  # seconds that placing the kept rows took, waits included
        self.dtype, self.device = dtype, device
        self.is_initialized = True
        self.rows = rows
        self._kept = kept
        self._projecting = False

    @property
    def keys(self) -> torch.Tensor:
        """``[1, kv_heads, slots, head_dim]``; waits until the layer is loaded."""
        self.settle()
        return self._keys  # type: ignore[no-any-return]

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self.settle()
        self._keys = keys

    @property
    def values(self) -> torch.Tensor:
        self.settle()
        return self._values  # type: ignore[no-any-return]

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self.settle()
        self._values = values

    def settle(self) -> None:
        """Put the kept rows in place."""
        if self._make is not None:
            begun = time.perf_counter()
            keys, values = self._make()
            self._keys, self._values = keys[:, :, : self._slots], values[:, :, : self._slots]
            self._make = None
            self.settling = time.perf_counter() - begun

    def narrow(self, rows: LinkRows, projecting: bool = False) -> None:
        """Expect only these rows. ``projecting``: write their K and V, then raise :class:`Projected`."""
        self.rows, self._projecting = rows, projecting

    def get_seq_length(self) -> int:
        """Kept rows before the linked forward, all rows after it."""
        return self._kept if self.rows is not None else super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No keys during the linked forward: attention goes by positions, and no mask is made."""
        return (0, 0) if self.rows is not None else super().get_mask_sizes(query_length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter the rows of the linked forward, or append."""
        if self.rows is None:
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        rows, self.rows = self.rows, None
        keys, values = self.keys, self.values
        at = rows.positions.as_index(keys.device)
        keys[0].index_copy_(1, at, key_states[0])
        values[0].index_copy_(1, at, value_states[0])
        if self._projecting:
            raise Projected
        return tagged(keys, rows), values


class LinkedCache(Cache):  # type: ignore[misc]
    """A cache of :class:`LinkedLayer`; what ``rag.link`` hands to ``model.generate``.

    ``before_layer`` cuts rows from layer to layer.
    """

    def __init__(self, layers: Sequence[LinkedLayer]) -> None:
        super().__init__(layers=list(layers))
        self.before_layer: BeforeLayer | None = None

    @property
    def kernels(self) -> str:
        """Which kernels attend in the linked forward: ``triton``, or ``torch`` and why."""
        names = []
        for layer in self.layers:
            query, keys, values = layer.keys[:0], layer.keys[0], layer.values[0]
            name = dispatch.attention_choice(query, keys, values)
            names.append(f"torch ({layer.device.type})" if name == "torch" else name)
        return "; ".join(dict.fromkeys(names))

    def settle(self) -> None:
        """Put the kept rows of all layers in place."""
        for layer in self.layers:
            layer.settle()

    @property
    def settling(self) -> float:
        """Seconds that placing kept rows has taken so far, waits for loading included."""
        return float(sum(layer.settling for layer in self.layers))
