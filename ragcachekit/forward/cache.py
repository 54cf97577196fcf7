"""The transformers cache of a linked prompt: scatters during the prefill, appends afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.forward.link_rows import LinkRows
from ragcachekit.forward.tagged_keys import tagged
from ragcachekit_kernels import dispatch


class Projected(Exception):
    """Raised instead of attending when only a layer's K and V are wanted; carries nothing."""


class Narrows(Protocol):
    """Makes a forward's rows fewer from layer to layer."""

    def before(self, layer: int, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """New ``(args, kwargs)`` of decoder layer ``layer``, or None to leave them."""
        ...


class Placed(Protocol):
    """What puts kept rows in place on a device (see :class:`ragcachekit.forward.placing.Placing`)."""

    @property
    def settling(self) -> float | None:
        """Seconds that it has taken, if that is known."""
        ...

    @property
    def on_device(self) -> bool:
        """Whether nothing is awaited from the host any more."""
        ...

    @property
    def coming(self) -> int:
        """Bytes that are awaited from the host, or have been."""
        ...


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

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> LayerBuffers:
        """Buffers that are there already."""
        return cls(lambda: (keys, values), keys.dtype, keys.device)

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

    @property
    def rows(self) -> LinkRows | None:
        """The rows still to be scattered."""
        return self._rows

    def scattered(self) -> None:
        """The rows are in place: somebody else wrote them."""
        self._rows = None

    def narrow(self, rows: LinkRows, projecting: bool = False) -> None:
        """Expect only these rows. ``projecting``: write their K and V, then raise :class:`Projected`."""
        self._rows, self._projecting = rows, projecting

    def get_seq_length(self) -> int:
        """Kept rows before the linked forward, all rows after it."""
        return self._kept if self._rows is not None else super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No keys during the linked forward: attention goes by positions, and no mask is made."""
        return (0, 0) if self._rows is not None else super().get_mask_sizes(query_length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter the rows of the linked forward, or append."""
        if self._rows is None:
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        rows, self._rows = self._rows, None
        keys, values = self.keys, self.values
        for item, (positions, offset) in enumerate(zip(rows.positions, rows.offsets, strict=True)):
            first = key_states.shape[-2] - len(positions)
            new = key_states[item, :, first:], value_states[item, :, first:]
            dispatch.scatter(*new, keys[item, :, offset:], values[item, :, offset:], positions)
        if self._projecting:
            raise Projected
        # The mark lives exactly as long as this layer's attention and not with the cache.
        return tagged(keys, rows), values


class LinkedCache(Cache):  # type: ignore[misc]
    """A cache of :class:`LinkedLayer`; what ``rag.link`` hands to ``model.generate``.

    ``placing``, where there is one, lives as long as the cache: sources of copies that are under way do.

    Attributes
    ----------
    narrowing : Narrows or None
        Makes the rows of the linked forward fewer from layer to layer.
    forward : str
        How the linked forward ran: ``graph``, ``eager``, or ``eager:`` and why not as a graph.
    """

    def __init__(self, layers: Sequence[LinkedLayer], placing: Placed | None = None) -> None:
        super().__init__(layers=list(layers))
        self._placing = placing
        self.narrowing: Narrows | None = None
        self.forward = "eager"

    @property
    def kernels(self) -> str:
        """Which kernels attend in the linked forward: ``triton``, or ``torch`` and why."""
        names = []
        for layer in self.layers:
            query, keys, values = layer.keys[:0], layer.keys[0], layer.values[0]
            name = dispatch.attention_choice(query, keys, values)
            names.append(f"torch ({layer.device.type})" if name == "torch" else name)
        return "; ".join(dict.fromkeys(names))

    @property
    def pending(self) -> bool:
        """Whether the linked forward, all of it, is still to come."""
        return all(layer.pending for layer in self.layers)

    @property
    def pending_rows(self) -> LinkRows:
        """Rows of the linked forward that is still to come."""
        rows = self.layers[0].rows
        assert rows is not None, "there is none to come"
        return rows  # type: ignore[no-any-return]

    def scattered(self) -> None:
        """The linked forward has run, and wrote its rows without the layers' help."""
        for layer in self.layers:
            layer.scattered()

    def settle(self) -> None:
        """Have the kept rows of all layers in place, whether or not the model has asked for them."""
        for layer in self.layers:
            layer.settle()

    @property
    def settling(self) -> float:
        """Seconds that putting kept rows in place has taken so far: the device's, where it tells them."""
        by_device = self._placing.settling if self._placing is not None else None
        seconds: float = sum(layer.settling for layer in self.layers)
        return seconds if by_device is None else by_device

    @property
    def on_device(self) -> bool:
        """Whether kernels put the kept rows in place and nothing is awaited from the host for that."""
        return self._placing is not None and self._placing.on_device

    @property
    def coming(self) -> int:
        """Bytes that are awaited from the host before the kept rows are in place; 0 if nobody knows."""
        return 0 if self._placing is None or self._placing.on_device else self._placing.coming
