"""Several tiers as one store, the fastest first, and how a configuration opens them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from ragcachekit.config import StoreConfig
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore, LayerSource, NullStore, StoreStats
from ragcachekit.store.eviction import open_eviction
from ragcachekit.store.memory import Cost, GpuStore, HostStore
from ragcachekit.store.quantised import QuantisedStore
from ragcachekit.types import KVKey


def open_store(config: StoreConfig, *, cost: Cost | None = None) -> KVStore:
    """Open the tiers of ``config``; NullStore for none.

    Models and tenants may share one store: fingerprint and namespace are part of every key. ``cost`` gives
    the seconds to compute an entry's KV, for ``pgdsf`` in the memory tiers, 0 where unknown; by default all
    entries cost the same per token. Raises StoreError if the disk tier's folder cannot be used or a remote
    tier's key is not set, ValueError for an unknown eviction policy.
    """
    tiers: list[KVStore] = []
    try:
        for name, tier in _tiers(config, cost):
            kind = config.quantise.get(name)
            tiers.append(QuantisedStore(tier, kind) if kind is not None else tier)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    if len(tiers) < 2:
        return tiers[0] if tiers else NullStore()
    return TieredStore(tiers, hot=1 if config.gpu_bytes else 0)


def _tiers(config: StoreConfig, cost: Cost | None) -> Iterator[tuple[str, KVStore]]:
    """The tiers, the fastest first; optional dependencies are imported only where configured."""
    limits: dict[str, Any]
    quotas = config.quotas
    options: dict[str, Any] = {"quotas": quotas, "cost": cost}
    if config.gpu_bytes:
        yield "gpu", GpuStore(config.gpu_bytes, policy=open_eviction(config.eviction), **options)
    if config.host_bytes:
        options["pinned"] = bool(config.gpu_bytes) or config.pin_host
        yield "host", HostStore(config.host_bytes, policy=open_eviction(config.eviction), **options)
    if config.disk_path is not None:
        from ragcachekit.store.disk import DiskStore, default_disk_bytes

        path = Path(config.disk_path)
        budget = default_disk_bytes(path) if config.disk_bytes is None else config.disk_bytes
        yield "disk", DiskStore(path, budget, quotas=quotas)
    if config.redis_url is not None:
        from ragcachekit.store.backends import RedisStore

        limits = {"entry_bytes": config.redis_entry_bytes, "deadline": config.remote_deadline}
        yield "redis", RedisStore(config.redis_url, key=config.remote_key, **limits)
    if config.bulk_url is not None:
        from ragcachekit.store.backends import FsspecStore

        yield "bulk", FsspecStore(config.bulk_url, key=config.remote_key, deadline=config.bulk_deadline)


class TieredStore(KVStore):
    """Several tiers, the fastest first, looked up in turn; hits are copied into the faster ones.

    A put goes to every tier but the first ``hot`` ones: encoding a corpus should not wash through GPU memory.
    What a tier evicts is handed down to the next one, unless that has it (RAGCache section 5.1: swap out only
    once). Nothing is handed down to a ``shared`` tier, where another process may have forgotten it, and no
    hit is copied into a ``remote`` one, which would wait for its service. Nothing moves while a forget runs,
    nor what was read before it ended.
    """

    def __init__(self, tiers: Sequence[KVStore], *, hot: int = 0) -> None:
        self.tiers = tuple(tiers)
        self._hot = min(hot, len(tiers) - 1)
        self._lock = RLock()  # around moves, and around forgetting in every tier
        self._is_forgetting = False
        self._forgets = 0

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`; a slow tier's entry is copied into the faster ones after reading."""
        since = self._forgets
        for place, tier in enumerate(self.tiers):
            opened = tier.open(key, weight)
            if isinstance(opened, Found):
                self._promote(key, opened.kv, place, since)
                return opened
            if opened is not None:
                break
        else:
            return None
        source = opened

        def finished(kv: ChunkKV) -> None:
            source.finished(kv)
            self._promote(key, kv, place, since)

        return replace(source, finished=finished)

    def sums(self, key: KVKey) -> Mapping[str, torch.Tensor] | None:
        """As the first tier that has the entry; nothing is copied into faster ones."""
        return next((sums for tier in self.tiers if (sums := tier.sums(key)) is not None), None)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Store ``kv`` in every tier that can (in hot ones only in place of an older version)."""
        # The slowest first: what it cannot serialise (a TypeError) is then in no faster tier.
        kept = [
            self._admit(place, key, kv)
            for place, tier in reversed(list(enumerate(self.tiers)))
            if place >= self._hot or key in tier
        ]
        return any(kept)

    def __contains__(self, key: KVKey) -> bool:
        return any(key in tier for tier in self.tiers)

    def in_memory(self, key: KVKey) -> bool:
        return any(tier.in_memory(key) for tier in self.tiers)

    def retain(self, key: KVKey, seconds: float) -> None:
        for tier in self.tiers:
            tier.retain(key, seconds)

    def discard(self, key: KVKey, *, damaged: bool = True) -> None:
        for tier in reversed(self.tiers):
            tier.discard(key, damaged=damaged)

    def keys(self, *, in_memory: bool = False) -> Iterator[KVKey]:
        """Keys of all tiers that list theirs, the slowest first; each once."""
        every = (tier.keys(in_memory=in_memory) for tier in reversed(self.tiers))
        return iter(dict.fromkeys(chain.from_iterable(every)))

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """Drop entries from every tier, even if one raises; copies count once."""
        dropped: set[str] = set()

        def drop(tier: KVStore) -> None:
            dropped.update(tier.drop(namespace, chunk_ids))

        self._is_forgetting = True  # moves that come now do not wait for it
        with self._lock:
            try:
                with ExitStack() as every:  # which goes on where a tier raises
                    for tier in reversed(self.tiers):
                        every.callback(drop, tier)
            finally:
                self._forgets += 1
                self._is_forgetting = False
        return frozenset(dropped)

    def stats(self) -> tuple[StoreStats, ...]:
        return tuple(record for tier in self.tiers for record in tier.stats())

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    def _promote(self, key: KVKey, kv: ChunkKV, place: int, since: int) -> None:
        """Copy an entry of tier ``place`` into the faster ones."""
        for faster in range(place):
            if not self.tiers[faster].remote:
                self._move(faster, key, kv, since)

    def _move(self, place: int, key: KVKey, kv: ChunkKV, since: int) -> None:
        """Write what another tier returned after ``since`` into tier ``place``, unless it is there."""
        if self._is_forgetting:
            return
        with self._lock:
            if self._forgets == since and key not in self.tiers[place]:
                self._admit(place, key, kv)

    def _admit(self, place: int, key: KVKey, kv: ChunkKV) -> bool:
        """Write into tier ``place``; evicted entries are handed down."""
        since = self._forgets
        kept, evicted = self.tiers[place].admit(key, kv)
        if place + 1 < len(self.tiers) and not self.tiers[place + 1].shared:
            for other, other_kv in evicted:
                self._move(place + 1, other, other_kv, since)
        return kept
