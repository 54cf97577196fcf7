"""Entries that are being read, and their layers as they come."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch

from ragcachekit.model.kv import ChunkKV, TensorShape, is_packed, scales_of, with_scales
from ragcachekit.model.packed import PackedKV, own_sums, unpacked_layer, unpacked_shapes
from ragcachekit.store.base import LayerSource
from ragcachekit.threads import Condition
from ragcachekit.types import KVKey

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer."""


class LoadFailed(Exception):
    """An entry that a request counts on will not come; the request is planned again without it.

    Raised inside a forward and caught where the forward was begun: no user sees it.

    Attributes
    ----------
    keys : frozenset of KVKey
    """

    def __init__(self, keys: frozenset[KVKey], why: str) -> None:
        super().__init__(why)
        self.keys = keys


@dataclass(eq=False)
class Load:
    """One reading of one entry, for every request that needs it. Guarded by the loader's condition.

    Attributes
    ----------
    late : callable
        Called with the condition held when a request has waited this many seconds in vain.
    pairs : list
        The layers that are read and verified; None for the others.
    rank : float
        Which request it is for: lower ones are read first. Infinite before any asked for it to begin.
    handles : WeakSet of LoadingKV
        Who waits for it. A load that nobody holds and nobody prefetched is given up.
    """

    key: KVKey
    source: LayerSource
    changed: Condition
    late: Callable[[Load, float], object]
    rank: float = float("inf")
    prefetched: bool = False
    busy: bool = False
    read: int = 0
    error: str | None = None
    begun: float = 0.0
    ended: float = 0.0
    pairs: list[Pair | None] = field(default_factory=list)
    handles: weakref.WeakSet[LoadingKV] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.pairs = [None] * self.source.layers

    @property
    def complete(self) -> bool:
        """Whether every layer is there."""
        return self.read == self.source.layers

    @property
    def read_bytes(self) -> int:
        """Bytes of one layer, about."""
        return self.source.nbytes // self.source.layers

    @property
    def wanted(self) -> bool:
        """Whether anybody would miss it."""
        return self.prefetched or len(self.handles) > 0

    def kv(self) -> ChunkKV:
        """All of it, once it is complete."""
        keys, values = zip(*(pair for pair in self.pairs if pair is not None), strict=True)
        kv = ChunkKV(keys, values, self.source.start, self.source.sums, self.source.quantised)
        return PackedKV.of(kv, kv.quantised) if is_packed(kv.sums) else kv


class LoadingKV:
    """One request's hold on an entry that is being read; stands where :class:`ChunkKV` stands for linking.

    What the header says is there at once. ``keys[i]`` and ``values[i]`` wait until layer ``i`` has been
    read and verified. Dropping the last hold gives the reading up. An entry that is read in eight bits
    looks unpacked, as :class:`~ragcachekit.model.packed.PackedKV` does. ``waited`` is for how many seconds
    this request has waited so far; what else it has is that of
    :class:`~ragcachekit.store.base.LayerSource`.
    """

    def __init__(self, load: Load, seconds: float) -> None:
        self._seconds = seconds
        self._until = float("inf")
        self.waited = 0.0
        source = load.source
        self.key, self.tier, self.nbytes = load.key, source.tier, source.nbytes
        self.tokens, self.layers, self.start = source.tokens, source.layers, source.start
        self.sums: Mapping[str, torch.Tensor] = own_sums(source.sums)
        self.quantised = source.quantised
        self.keys: Sequence[torch.Tensor] = _Side(self, 0)
        self.values: Sequence[torch.Tensor] = _Side(self, 1)
        self.load = load
        load.handles.add(self)

    @property
    def shapes(self) -> tuple[tuple[TensorShape, TensorShape], ...]:
        """Per layer, dtype and shape of keys and of values; does not wait."""
        source = self.load.source
        return unpacked_shapes(source.shapes, source.sums) if is_packed(source.sums) else source.shapes

    @property
    def stored_shapes(self) -> tuple[tuple[TensorShape, ...], ...]:
        """Per layer, dtypes and shapes of :meth:`stored_layer`; does not wait."""
        return with_scales(self.load.source.shapes, self.load.source.sums)

    @property
    def ready(self) -> int:
        """Layers that are there."""
        return self.load.read

    @property
    def complete(self) -> bool:
        """Whether all layers are there."""
        return self.load.complete

    @property
    def lost(self) -> str | None:
        """Why it will not come (in time); None while it may, and when it has."""
        if self.load.complete:
            return None
        if self.load.error is None and time.monotonic() > self._until:
            return f"not there within {self._seconds:g} s"
        return self.load.error

    @property
    def span(self) -> tuple[float, float]:
        """When its reading was asked for and when it ended, by :func:`time.perf_counter`; (0, 0) before."""
        return self.load.begun, self.load.ended

    def claimed(self) -> None:
        """A request counts on it from now on: the deadline runs."""
        self._until = time.monotonic() + self._seconds

    def layer(self, number: int) -> Pair:
        """Keys and values of one layer, ``[kv_heads, tokens, head_dim]`` each.

        Raises
        ------
        LoadFailed
            If they cannot be read, are damaged, or are not there before the deadline.
        """
        pair, sums = self._read(number), self.load.source.sums
        return unpacked_layer(number, *pair, sums) if is_packed(sums) else pair

    def stored_layer(self, number: int) -> tuple[torch.Tensor, ...]:
        """As :meth:`layer`; what is read in eight bits comes as it is, with its scales."""
        return *self._read(number), *scales_of(self.load.source.sums, number)

    def _read(self, number: int) -> Pair:
        pair = self.load.pairs[number]
        return pair if pair is not None else self._wait(number)

    def _wait(self, number: int) -> Pair:
        begun = time.perf_counter()
        load = self.load
        there = load.changed.wait_for(
            lambda: load.pairs[number] is not None or load.error is not None,
            max(0.0, self._until - time.monotonic()),
        )
        if not there:
            with load.changed:
                load.late(load, self._seconds)
        self.waited += time.perf_counter() - begun
        pair = load.pairs[number]
        if pair is None:
            raise LoadFailed(frozenset([self.key]), load.error or f"not there within {self._seconds:g} s")
        return pair


AnyKV = ChunkKV | LoadingKV
"""What the linker places: KV that is there, or on its way."""


@dataclass(frozen=True, eq=False)
class Hit:
    """What a store has under a key, and in which tier."""

    kv: AnyKV
    tier: str


class _Side(Sequence[torch.Tensor]):
    """Keys or values of a :class:`LoadingKV`, as a sequence over layers."""

    def __init__(self, kv: LoadingKV, side: int) -> None:
        # Not the handle: it must go when the request drops it, without waiting for a cycle to be found.
        self._kv = weakref.proxy(kv)
        self._side = side

    def __len__(self) -> int:
        return int(self._kv.layers)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[torch.Tensor, ...]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | tuple[torch.Tensor, ...]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return tuple(self._tensor(number) for number in numbers)
        return self._tensor(numbers)

    def _tensor(self, number: int) -> torch.Tensor:
        tensor: torch.Tensor = self._kv.layer(number)[self._side]
        return tensor
