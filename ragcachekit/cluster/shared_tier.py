"""The tier that the processes of a cluster share."""

from __future__ import annotations

from dataclasses import replace

from ragcachekit.config import StoreConfig

KEY = "RAGCACHEKIT_KEY"
"""Environment variable with the key that signs entries, by default."""

_PATIENCE = 60.0  # seconds; no request waits for a write in bulk
_MAX_ENTRY_BYTES = 256 << 20


def shared_tier(url: str, key: str = KEY, *, host_bytes: int = 0) -> StoreConfig:
    """The configuration of a tier that processes share.

    Parameters
    ----------
    url : str
        ``redis://host:port/0`` (``rediss://``, ``unix://``), or a folder of any fsspec file system:
        ``s3://bucket/kv``, ``file:///mnt/kv``. Redis' budget is its ``maxmemory``; a folder has none.
    key : str
        Environment variable with the key that signs entries, on every machine.
    host_bytes : int
        Budget of the process's own memory tier. Without one, the tier is for writing a corpus: no request
        waits, and operations may take a minute.
    """
    if url.startswith(("redis:", "rediss:", "unix:")):
        config = StoreConfig(redis_url=url, redis_entry_bytes=_MAX_ENTRY_BYTES, remote_key=key)
    else:
        config = StoreConfig(bulk_url=url, remote_key=key)
    if host_bytes:
        return replace(config, host_bytes=host_bytes)
    return replace(config, host_bytes=0, remote_deadline=_PATIENCE, bulk_deadline=_PATIENCE)
