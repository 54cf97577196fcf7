"""The transformers cache of a linked prompt: scatters during the prefill, appends afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.link.marks import mark_of, marked


class Observer(Protocol):
    """Sees the rows of a forward attend, layer by layer, before their attention is computed."""

    def saw(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, positions: Sequence[int], **options: Any
    ) -> None:
        """Query ``[heads, rows, head_dim]``, rotated, over key ``[kv_heads, tokens, head_dim]``.

        ``options`` are the keyword arguments of ``ragcachekit_kernels.dispatch.column_scores``.
        """
        ...


class Projected(Exception):
    """Raised instead of attending when only a layer's K and V are wanted; carries nothing."""


class Narrows(Protocol):
    """Makes a forward's rows fewer from layer to layer."""

    def before(self, layer: int, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """New ``(args, kwargs)`` of decoder layer ``layer``, or None to leave them."""
        ...


@dataclass(frozen=True)
class LinkRows:
    """The rows of one linked forward.

    Attributes
    ----------
    positions : tuple of tuple of int
        Per prompt of the batch, the ascending positions of its rows. A prompt with fewer rows than
        the widest one is padded in front; padding rows are computed and thrown away.
    offsets : tuple of int
        Per prompt, the slot of its position 0 (the cache is left-padded to a common length).
    observer : Observer, optional
        Told about every layer of the forward.
    """

    positions: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    observer: Observer | None = None


def linked_rows(keys: torch.Tensor) -> LinkRows | None:
    """The rows that a cache layer marked ``keys`` with, or None outside a linked forward."""
    mark = mark_of(keys)
    return mark if isinstance(mark, LinkRows) else None


class LinkedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a linked prompt.

    Until its first ``update`` it reports only the kept rows, so that generate feeds exactly the
    rows to compute; that update scatters them to their positions. Then it is an ordinary dynamic
    layer, sorted by position. Never a sliding layer: kept rows of any position must survive the
    prefill, and masks come from positions.

    Parameters
    ----------
    keys, values : torch.Tensor
        ``[batch, kv_heads, slots, head_dim]``, this request's own buffers, kept rows in place.
    rows : LinkRows or None
        Rows still to come; None if everything is in place already.
    kept : int
        Length to report until then.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: LinkRows | None, kept: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._rows = rows
        self._kept = kept
        self._projecting = False

    @property
    def pending(self) -> bool:
        """Whether rows are still to be scattered."""
        return self._rows is not None

    def narrow(self, rows: LinkRows, projecting: bool = False) -> None:
        """Expect only these rows. ``projecting``: write their K and V, then raise :class:`Projected`."""
        self._rows, self._projecting = rows, projecting

    def get_seq_length(self) -> int:
        """Kept rows before the linked forward, all rows after it."""
        return self._kept if self._rows is not None else super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """During the linked forward no mask is read (attention goes by positions): keep it small."""
        return (query_length, 0) if self._rows is not None else super().get_mask_sizes(query_length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter the rows of the linked forward, or append."""
        if self._rows is None:
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        rows, self._rows = self._rows, None
        for item, (positions, offset) in enumerate(zip(rows.positions, rows.offsets, strict=True)):
            slots = torch.tensor(positions, device=self.keys.device) + offset
            first = key_states.shape[-2] - len(positions)
            self.keys[item].index_copy_(1, slots, key_states[item, :, first:])
            self.values[item].index_copy_(1, slots, value_states[item, :, first:])
        if self._projecting:
            raise Projected
        # The mark lives exactly as long as this layer's attention and not with the cache.
        return marked(self.keys, rows), self.values


class LinkedCache(Cache):  # type: ignore[misc]
    """A cache of :class:`LinkedLayer`; what ``rag.link`` hands to ``model.generate``."""

    def __init__(self, layers: Sequence[LinkedLayer]) -> None:
        super().__init__(layers=list(layers))
        self.narrowing: Narrows | None = None
