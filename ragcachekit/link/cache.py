"""The transformers cache of a linked prompt: scatters during the prefill, appends afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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


class LayerBuffers:
    """One layer's keys and values of a request, made when they are needed.

    Each ``[batch, kv_heads, slots, head_dim]``. The model asks for layer 0 first; meanwhile the others
    may still be read from a slow tier.

    Parameters
    ----------
    make : callable
        Allocates both and puts every kept row in its place; called once.
    dtype, device
        What they will have.
    """

    def __init__(
        self,
        make: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.dtype, self.device = dtype, device
        self._make: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = make
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def get(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers.

        Raises
        ------
        LoadFailed
            If one of the pieces did not come.
        """
        if self._made is None:
            assert self._make is not None
            self._made, self._make = self._make(), None
        return self._made


class LinkedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a linked prompt.

    Until its first ``update`` it reports only the kept rows, so that generate feeds exactly the
    rows to compute; that update scatters them to their positions. Then it is an ordinary dynamic
    layer, sorted by position. Never a sliding layer: kept rows of any position must survive the
    prefill, and masks come from positions.

    Parameters
    ----------
    buffers : LayerBuffers
        This request's own; made when ``keys`` or ``values`` are first asked for.
    slots : int
        How many of their columns belong to this prompt.
    rows : LinkRows or None
        Rows still to come; None if everything is in place already.
    kept : int
        Length to report until then.

    Attributes
    ----------
    settling : float
        Seconds that putting the kept rows in place took, waiting for them included.
    """

    def __init__(self, buffers: LayerBuffers, slots: int, rows: LinkRows | None, kept: int) -> None:
        self._buffers: LayerBuffers | None = None
        self._keys: Any = None
        self._values: Any = None
        super().__init__()
        self._buffers, self._slots = buffers, slots
        self.settling = 0.0
        self.dtype, self.device = buffers.dtype, buffers.device
        self.is_initialized = True
        self._rows = rows
        self._kept = kept
        self._projecting = False

    @property
    def keys(self) -> torch.Tensor:
        """``[batch, kv_heads, slots, head_dim]``; waits for the layer where it is not there yet."""
        self.settle()
        return self._keys  # type: ignore[no-any-return]

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self.settle()
        self._keys = keys

    @property
    def values(self) -> torch.Tensor:
        """As :attr:`keys`."""
        self.settle()
        return self._values  # type: ignore[no-any-return]

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self.settle()
        self._values = values

    def settle(self) -> None:
        """Have the kept rows in place."""
        if self._buffers is not None:
            begun = time.perf_counter()
            keys, values = self._buffers.get()
            self._keys, self._values = keys[:, :, : self._slots], values[:, :, : self._slots]
            self._buffers = None
            self.settling = time.perf_counter() - begun

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
        keys, values = self.keys, self.values
        for item, (positions, offset) in enumerate(zip(rows.positions, rows.offsets, strict=True)):
            slots = torch.tensor(positions, device=keys.device) + offset
            first = key_states.shape[-2] - len(positions)
            keys[item].index_copy_(1, slots, key_states[item, :, first:])
            values[item].index_copy_(1, slots, value_states[item, :, first:])
        if self._projecting:
            raise Projected
        # The mark lives exactly as long as this layer's attention and not with the cache.
        return marked(keys, rows), values


class LinkedCache(Cache):  # type: ignore[misc]
    """A cache of :class:`LinkedLayer`; what ``rag.link`` hands to ``model.generate``."""

    def __init__(self, layers: Sequence[LinkedLayer]) -> None:
        super().__init__(layers=list(layers))
        self.narrowing: Narrows | None = None

    def settle(self) -> None:
        """Have the kept rows of all layers in place, whether or not the model has asked for them."""
        for layer in self.layers:
            layer.settle()

    @property
    def settling(self) -> float:
        """Seconds that putting kept rows in place has taken so far."""
        seconds: float = sum(layer.settling for layer in self.layers)
        return seconds
