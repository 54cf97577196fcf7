"""Several tiers as one store, the fastest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import RLock
from typing import Protocol

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, KVStore, LayerSource, StoreStats
from ragcachekit.types import KVKey


class Tier(KVStore, Protocol):
    """A store that can say which entries it dropped, so that copies in several tiers count once."""

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As ``forget``, returning the digests of the dropped keys."""
        ...

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As ``put``, returning also whom it evicted, where those may be kept in a slower tier."""
        ...


class TieredStore:
    """Looks in each tier in turn; what it finds is copied into the faster ones.

    A put goes to every tier but the ``hot`` ones, which take only what a request asked for. What a tier
    evicts is handed down to the next one, unless that has it: swapped out once, later evictions only
    free (RAGCache section 5.1).

    Parameters
    ----------
    tiers : sequence of Tier
        Fastest first; at least one.
    hot : int
        How many of them, from the first on, are filled by hits alone (GPU memory: a corpus that is
        encoded ahead should not wash through it). The last tier takes every put.
    """

    def __init__(self, tiers: Sequence[Tier], *, hot: int = 0) -> None:
        if not tiers:
            raise ValueError("a tiered store needs at least one tier; use NullStore for none")
        self._tiers = tuple(tiers)
        self._hot = min(hot, len(tiers) - 1)
        # Counts the ends of drops. Whoever moves an entry between tiers took this number before reading
        # it, and lets it be if a drop came between or is under way: forgotten entries stay forgotten.
        self._epoch = 0
        self._dropping = 0
        self._moving = RLock()

    def get(self, key: KVKey, worth: float = 1.0) -> Found | None:
        """The entry from the fastest tier that has it, or None."""
        epoch = self._epoch
        for place, tier in enumerate(self._tiers):
            found = tier.get(key, worth)
            if found is not None:
                self._promote(key, found.kv, place, epoch)
                return found
        return None

    def open(self, key: KVKey, worth: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`; a slow tier's entry is copied into the faster ones once it was read."""
        epoch = self._epoch
        for place, tier in enumerate(self._tiers):
            opened = tier.open(key, worth)
            if isinstance(opened, Found):
                self._promote(key, opened.kv, place, epoch)
                return opened
            if opened is not None:
                return _Promoting(opened, self, key, place, epoch)
        return None

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Keep ``kv`` in every tier that can (the hot ones: in place of what they have)."""
        epoch = self._epoch
        kept = [
            self._admit(place, key, kv, epoch)
            for place, tier in enumerate(self._tiers)
            if place >= self._hot or key in tier
        ]
        return any(kept)

    def __contains__(self, key: KVKey) -> bool:
        return any(key in tier for tier in self._tiers)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys."""
        with self._moving:
            self._dropping += 1
        try:
            return frozenset[str]().union(*(tier.drop(namespace, chunk_ids) for tier in self._tiers))
        finally:
            with self._moving:
                self._dropping -= 1
                self._epoch += 1

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop entries from every tier; an entry held by several counts once."""
        return len(self.drop(namespace, chunk_ids))

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per tier, fastest first."""
        return tuple(record for tier in self._tiers for record in tier.stats())

    def close(self) -> None:
        """Close every tier."""
        for tier in self._tiers:
            tier.close()

    def _may_move(self, epoch: int) -> bool:
        return self._epoch == epoch and not self._dropping

    def _promote(self, key: KVKey, kv: ChunkKV, place: int, epoch: int) -> None:
        """Copy what tier ``place`` had into the faster ones."""
        for faster in range(place):
            with self._moving:
                if self._may_move(epoch) and key not in self._tiers[faster]:
                    self._admit(faster, key, kv, epoch)

    def _admit(self, place: int, key: KVKey, kv: ChunkKV, epoch: int) -> bool:
        kept, evicted = self._tiers[place].admit(key, kv)
        if place + 1 < len(self._tiers):
            for other, other_kv in evicted:
                with self._moving:
                    if self._may_move(epoch) and other not in self._tiers[place + 1]:
                        self._admit(place + 1, other, other_kv, epoch)
        return kept


class _Promoting:
    """A slow tier's entry that is copied into the faster tiers when all of it was read."""

    def __init__(self, source: LayerSource, store: TieredStore, key: KVKey, place: int, epoch: int) -> None:
        self._source, self._store = source, store
        self._key, self._place, self._epoch = key, place, epoch
        self.tier, self.nbytes = source.tier, source.nbytes
        self.tokens, self.layers, self.start = source.tokens, source.layers, source.start
        self.sums: Mapping[str, torch.Tensor] = source.sums
        self.quantised, self.shapes = source.quantised, source.shapes

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._source.layer(number)

    def finished(self, kv: ChunkKV) -> None:
        self._source.finished(kv)
        self._store._promote(self._key, kv, self._place, self._epoch)

    def close(self) -> None:
        self._source.close()
