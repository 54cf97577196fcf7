"""Several tiers as one store, the fastest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore, LayerSource, StoreStats, Tier, WrappedSource
from ragcachekit.threads import Condition, refuse_after_fork
from ragcachekit.types import KVKey


class InFlightMoves:
    """Moves between tiers; one whose namespace was dropped since the entry was read is refused.

    Moves never wait; a drop waits for the moves of its own namespace.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        refuse_after_fork(self)
        self._moving: Counter[str] = Counter()
        self._dropping: Counter[str] = Counter()
        self._drops = 0
        self._dropped: dict[str, int] = {}  # namespace to the number of its last drop

    def now(self) -> int:
        """The number to take before an entry is read, for :meth:`move`."""
        return self._drops

    @contextmanager
    def move(self, namespace: str, since: int) -> Iterator[bool]:
        """Whether an entry may be written into another tier: not after or during a drop in its namespace."""
        with self._changed:
            may = not self._dropping[namespace] and self._dropped.get(namespace, 0) <= since
            self._moving[namespace] += may
        try:
            yield may
        finally:
            with self._changed:
                self._moving -= Counter({namespace: int(may)})  # removes zeros
                self._changed.notify_all()

    @contextmanager
    def drop(self, namespace: str) -> Iterator[None]:
        """A block in which tiers forget and nothing of the namespace moves."""
        with self._changed:
            self._dropping[namespace] += 1
        try:
            self._changed.wait_for(lambda: not self._moving[namespace])
            yield
        finally:
            with self._changed:
                self._dropping -= Counter([namespace])
                self._drops += 1
                self._dropped[namespace] = self._drops


class TieredStore(KVStore):
    """Several tiers, looked up in turn; hits are copied into the faster ones.

    A put goes to every tier but the ``hot`` ones. What a tier evicts is handed down to the next one, unless
    that has it (RAGCache section 5.1: swap out only once). Nothing is handed down to a ``shared`` tier, where
    another process may have forgotten it, and no hit is copied into a ``remote`` one, which would wait for
    its service.

    Parameters
    ----------
    tiers : sequence of Tier
        Fastest first; at least one.
    hot : int
        How many of them, from the first on, are filled by hits alone: encoding a corpus should not wash
        through GPU memory. The last tier takes every put.
    """

    def __init__(self, tiers: Sequence[Tier], *, hot: int = 0) -> None:
        self._tiers = tuple(tiers)
        self._hot = min(hot, len(tiers) - 1)
        self._moves = InFlightMoves()

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        since = self._moves.now()
        for place, tier in enumerate(self._tiers):
            found = tier.get(key, weight)
            if found is not None:
                self._promote(key, found.kv, place, since)
                return found
        return None

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`; a slow tier's entry is copied into the faster ones after reading."""
        since = self._moves.now()
        for place, tier in enumerate(self._tiers):
            opened = tier.open(key, weight)
            if isinstance(opened, Found):
                self._promote(key, opened.kv, place, since)
                return opened
            if opened is not None:
                return _Promoting(opened, partial(self._promote, key, place=place, since=since))
        return None

    def sums(self, key: KVKey) -> Mapping[str, torch.Tensor] | None:
        """As the first tier that has the entry; nothing is copied into faster ones."""
        return next((sums for tier in self._tiers if (sums := tier.sums(key)) is not None), None)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Store ``kv`` in every tier that can (in hot ones only in place of an older version)."""
        # The slowest first: what it cannot serialise (a TypeError) is then in no faster tier.
        kept = [
            self._admit(place, key, kv)
            for place, tier in reversed(list(enumerate(self._tiers)))
            if place >= self._hot or key in tier
        ]
        return any(kept)

    def __contains__(self, key: KVKey) -> bool:
        return any(key in tier for tier in self._tiers)

    def in_memory(self, key: KVKey) -> bool:
        return any(tier.in_memory(key) for tier in self._tiers)

    def discard(self, key: KVKey) -> None:
        for tier in reversed(self._tiers):
            tier.discard(key)

    def keys(self) -> Iterator[KVKey]:
        """Keys of all tiers that list theirs, the slowest first; each once."""
        return iter(dict.fromkeys(chain.from_iterable(tier.keys() for tier in reversed(self._tiers))))

    def memory_keys(self) -> Iterator[KVKey]:
        return iter(dict.fromkeys(chain.from_iterable(tier.memory_keys() for tier in self._tiers)))

    def evict(self, key: KVKey) -> None:
        for tier in reversed(self._tiers):
            tier.evict(key)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop entries from every tier, even if one raises; copies count once."""
        dropped: set[str] = set()

        def drop(tier: Tier) -> None:
            dropped.update(tier.drop(namespace, chunk_ids))

        with self._moves.drop(namespace), ExitStack() as every:  # which goes on where a tier raises
            for tier in reversed(self._tiers):
                every.callback(drop, tier)
        return len(dropped)

    def stats(self) -> tuple[StoreStats, ...]:
        return tuple(record for tier in self._tiers for record in tier.stats())

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()

    def _promote(self, key: KVKey, kv: ChunkKV, place: int, since: int) -> None:
        """Copy an entry of tier ``place`` into the faster ones."""
        for faster in range(place):
            if not self._tiers[faster].remote:
                self._move(faster, key, kv, since)

    def _move(self, place: int, key: KVKey, kv: ChunkKV, since: int) -> None:
        """Write what another tier returned after ``since`` into tier ``place``, unless it is there."""
        with self._moves.move(key.namespace, since) as may:
            if may and key not in self._tiers[place]:
                self._admit(place, key, kv)

    def _admit(self, place: int, key: KVKey, kv: ChunkKV) -> bool:
        """Write into tier ``place``; evicted entries are handed down."""
        since = self._moves.now()
        kept, evicted = self._tiers[place].admit(key, kv)
        if place + 1 < len(self._tiers) and not self._tiers[place + 1].shared:
            for other, other_kv in evicted:
                self._move(place + 1, other, other_kv, since)
        return kept


class _Promoting(WrappedSource):
    """A slow tier's entry that is copied into the faster tiers after reading."""

    def __init__(self, source: LayerSource, promote: Callable[[ChunkKV], object]) -> None:
        super().__init__(source)
        self._promote = promote

    def finished(self, kv: ChunkKV) -> None:
        """Count the hit, and copy the KV."""
        super().finished(kv)
        self._promote(kv)
