"""Several tiers as one store, the fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore, StoreStats
from ragcachekit.types import KVKey


class Tier(KVStore, Protocol):
    """A store that can say which entries it dropped, so that copies in several tiers count once."""

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As ``forget``, returning the digests of the dropped keys."""
        ...


class TieredStore:
    """Looks in each tier in turn; a hit is copied into the faster tiers, a put goes to all of them.

    Parameters
    ----------
    tiers : sequence of Tier
        Fastest first; at least one.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        if not tiers:
            raise ValueError("a tiered store needs at least one tier; use NullStore for none")
        self._tiers = tuple(tiers)
        self._epoch = 0
        self._promotion = Lock()

    def get(self, key: KVKey) -> Found | None:
        """The entry from the fastest tier that has it, or None."""
        epoch = self._epoch
        for place, tier in enumerate(self._tiers):
            found = tier.get(key)
            if found is not None:
                self._promote(key, found.kv, self._tiers[:place], epoch)
                return found
        return None

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Keep ``kv`` in every tier that can; True if at least one does."""
        kept = [tier.put(key, kv) for tier in self._tiers]
        return any(kept)

    def __contains__(self, key: KVKey) -> bool:
        return any(key in tier for tier in self._tiers)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys."""
        dropped: frozenset[str] = frozenset()
        # Slowest first, and a new epoch before each tier: a get that read a slow tier before its
        # entry went cannot put it back into a faster tier that has been cleared already.
        for tier in reversed(self._tiers):
            with self._promotion:
                self._epoch += 1
            dropped |= tier.drop(namespace, chunk_ids)
        return dropped

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

    def _promote(self, key: KVKey, kv: ChunkKV, faster: Sequence[Tier], epoch: int) -> None:
        if not faster:
            return
        with self._promotion:
            if self._epoch != epoch:
                return
            for tier in faster:
                if key not in tier:
                    tier.put(key, kv)
