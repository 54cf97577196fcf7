"""From a configuration to an open store."""

from __future__ import annotations

from pathlib import Path

from ragcachekit.config import StoreConfig
from ragcachekit.store.base import KVStore
from ragcachekit.store.host import HostStore
from ragcachekit.store.null import NullStore
from ragcachekit.store.tiered import Tier, TieredStore


def open_store(config: StoreConfig) -> KVStore:
    """Open the tiers that ``config`` asks for: host memory before disk, NullStore for neither.

    Models and tenants may share one store: fingerprint and namespace are part of every key.

    Raises
    ------
    StoreError
        If the disk tier's folder cannot be used; the message says what to do.
    """
    tiers: list[Tier] = []
    if config.host_bytes:
        tiers.append(HostStore(config.host_bytes))
    if config.disk_path is not None:
        from ragcachekit.store.disk import DiskStore  # POSIX only; a host-only store works anywhere

        tiers.append(DiskStore(Path(config.disk_path), config.disk_bytes))
    return TieredStore(tiers) if tiers else NullStore()
