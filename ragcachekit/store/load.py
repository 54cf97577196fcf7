"""Entries that are being read layer by layer."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ragcachekit.model.kv import ChunkKV, TensorShape, is_packed, scales_of
from ragcachekit.store.base import LayerSource, Pair
from ragcachekit.store.quantised import PackedKV, own_sums, unpacked_layer, unpacked_shapes
from ragcachekit.threads import Condition, Job
from ragcachekit.types import KVKey

PREFETCH = float(1 << 62)
"""Rank of loads for which no request waits."""

IDLE = float("inf")
"""Rank of loads that are not to be read yet."""


class LoadFailed(Exception):
    """Entries (``keys``) that a request needs cannot be read in time; it is planned again without them."""

    def __init__(self, keys: frozenset[KVKey], why: str) -> None:
        super().__init__(why)
        self.keys = keys


@dataclass(eq=False)
class Load:
    """One entry that is read for every request that needs it, guarded by the loader's condition."""

    key: KVKey
    source: LayerSource
    changed: Condition
    late: Callable[[Load, float], object]  # called when a request has waited so many seconds in vain
    rank: float = IDLE  # of the earliest request it is read for; the lowest is read first
    job: Job | None = None  # that reads a layer, or has read the last one
    job_begun: float = 0.0  # by time.monotonic
    read: int = 0  # layers
    error: str | None = None
    begun: float = 0.0
    ended: float = 0.0
    pairs: list[Pair | None] = field(default_factory=list)  # None: not read and verified yet
    handles: weakref.WeakSet[LoadingKV] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.pairs = [None] * self.source.layers

    @property
    def complete(self) -> bool:
        """Whether every layer is read."""
        return self.read == self.source.layers

    @property
    def layer_bytes(self) -> int:
        """Bytes per layer, on average."""
        return self.source.nbytes // self.source.layers

    def begin(self, rank: float) -> None:
        """Have it read for one more request, or be prefetched."""
        self.rank = min(self.rank, rank)
        self.begun = self.begun or time.perf_counter()

    def kv(self) -> ChunkKV:
        """The whole entry; only once it is complete."""
        keys, values = zip(*(pair for pair in self.pairs if pair is not None), strict=True)
        kv = ChunkKV(keys, values, self.source.start, self.source.sums, self.source.quantised)
        return PackedKV.of(kv, kv.quantised) if is_packed(kv.sums) else kv


class LoadingKV:
    """One request's handle of an entry that is being read, in place of a :class:`ChunkKV`.

    Attributes come from the header and never wait; they are those of
    :class:`~ragcachekit.store.base.LayerSource`. ``keys[i]`` and ``values[i]`` wait until layer ``i`` is read
    and verified. Entries in eight bits look unpacked, as in :class:`~ragcachekit.store.quantised.PackedKV`.
    Reading stops when the last handle is dropped. ``waited`` counts this request's seconds of waiting.
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
        self.keys, self.values = _Tensors(self, 0), _Tensors(self, 1)
        self.load = load
        load.handles.add(self)

    @property
    def shapes(self) -> tuple[tuple[TensorShape, TensorShape], ...]:
        """Dtype and shape of keys and of values, per layer."""
        source = self.load.source
        return unpacked_shapes(source.shapes, source.sums) if is_packed(source.sums) else source.shapes

    @property
    def ready(self) -> int:
        """Layers that are read."""
        return self.load.read

    @property
    def lost(self) -> str | None:
        """Why the entry cannot be read (in time), or None."""
        if self.load.complete:
            return None
        if self.load.error is None and time.monotonic() > self._until:
            return f"not there within {self._seconds:g} s"
        return self.load.error

    @property
    def span(self) -> tuple[float, float]:
        """Begin and end of the reading by :func:`time.perf_counter`, 0 until then."""
        return self.load.begun, self.load.ended

    def start_deadline(self) -> None:
        """Count the seconds that a request may wait from now on."""
        self._until = time.monotonic() + self._seconds

    def layer(self, number: int) -> Pair:
        """Keys and values of one layer, ``[kv_heads, tokens, head_dim]`` each.

        Raises
        ------
        LoadFailed
            If it is damaged or cannot be read before the deadline.
        """
        pair, sums = self._read(number), self.load.source.sums
        return unpacked_layer(number, *pair, sums) if is_packed(sums) else pair

    def stored_layer(self, number: int) -> tuple[torch.Tensor, ...]:
        """One layer as it is stored: eight-bit tensors with their scales, others as in :meth:`layer`."""
        return *self._read(number), *scales_of(self.load.source.sums, number)

    def _read(self, number: int) -> Pair:
        load = self.load
        if (pair := load.pairs[number]) is not None:
            return pair
        begun = time.perf_counter()
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
"""KV in memory, or being read."""


@dataclass(frozen=True, eq=False)
class Hit:
    """The KV under a key and the tier that has it."""

    kv: AnyKV
    tier: str


class _Tensors:
    """Keys or values of a :class:`LoadingKV`, by layer."""

    def __init__(self, kv: LoadingKV, part: int) -> None:
        self._kv = weakref.proxy(kv)  # no cycle: a dropped handle ends its load at once
        self._part = part

    def __len__(self) -> int:
        return int(self._kv.layers)

    def __getitem__(self, number: int) -> torch.Tensor:
        tensor: torch.Tensor = self._kv.layer(number)[self._part]
        return tensor
