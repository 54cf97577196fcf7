"""Opening the store of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragcachekit.config import StoreConfig
from ragcachekit.store.base import KVStore, NullStore, Tier
from ragcachekit.store.disk import default_disk_bytes
from ragcachekit.store.eviction import open_eviction
from ragcachekit.store.memory import Cost, GpuStore, HostStore
from ragcachekit.store.quantised import QuantisedStore
from ragcachekit.store.tiered import TieredStore


def open_store(config: StoreConfig, *, cost: Cost | None = None) -> KVStore:
    """Open the tiers of ``config``, the fastest first; NullStore for none.

    Models and tenants may share one store: fingerprint and namespace are part of every key.

    Parameters
    ----------
    config : StoreConfig
    cost : callable, optional
        Seconds to compute an entry's KV, for ``pgdsf`` in the memory tiers; 0 where unknown. By default all
        entries cost the same per token. :class:`~ragcachekit.RagCache` passes its model's prefill times.

    Raises
    ------
    StoreError
        If the disk tier's folder cannot be used, or a remote tier's key is not set.
    ValueError
        For an unknown eviction policy.
    """
    tiers: list[Tier] = []
    try:
        for name, tier in _tiers(config, cost):
            kind = config.quantise.get(name)
            tiers.append(QuantisedStore(tier, kind) if kind is not None else tier)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    if not tiers:
        return NullStore()
    return TieredStore(tiers, hot=1 if config.gpu_bytes else 0)


def _tiers(config: StoreConfig, cost: Cost | None) -> Iterator[tuple[str, Tier]]:
    """The tiers; optional dependencies are imported only where configured."""
    quotas = config.quotas
    if config.gpu_bytes:
        policy = open_eviction(config.eviction)
        yield "gpu", GpuStore(config.gpu_bytes, policy=policy, quotas=quotas, cost=cost)
    if config.host_bytes:
        pinned, policy = bool(config.gpu_bytes) or config.pin_host, open_eviction(config.eviction)
        yield "host", HostStore(config.host_bytes, pinned=pinned, policy=policy, quotas=quotas, cost=cost)
    if config.disk_path is not None:
        from ragcachekit.store.disk import DiskStore

        path = Path(config.disk_path)
        budget = default_disk_bytes(path) if config.disk_bytes is None else config.disk_bytes
        yield "disk", DiskStore(path, budget, quotas=quotas)
    if config.redis_url is not None:
        from ragcachekit.store.redis_store import RedisStore

        limits: dict[str, Any] = {"entry_bytes": config.redis_entry_bytes, "deadline": config.remote_deadline}
        yield "redis", RedisStore(config.redis_url, key=config.remote_key, **limits)
    if config.bulk_url is not None:
        from ragcachekit.store.fsspec_store import FsspecStore

        more: dict[str, Any] = {"deadline": config.bulk_deadline, "quotas": quotas}
        yield "bulk", FsspecStore(config.bulk_url, config.bulk_bytes, key=config.remote_key, **more)
