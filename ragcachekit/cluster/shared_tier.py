"""The tier that the processes of a cluster share."""

from __future__ import annotations

from ragcachekit.config import DEFAULT_DISK_BYTES, StoreConfig

KEY = "RAGCACHEKIT_KEY"
"""Environment variable with the key that signs entries, by default."""

_PATIENCE = 60.0  # seconds; no request waits for a write in bulk
_LARGEST = 512 << 20  # Redis' own limit of a value


def shared_tier(url: str, nbytes: int | None = None, key: str = KEY) -> StoreConfig:
    """The configuration for writing a corpus into a shared tier, without tiers of this process.

    Parameters
    ----------
    url : str
        ``redis://host:port/0`` (``rediss://``, ``unix://``), or a folder of any fsspec file system:
        ``s3://bucket/kv``, ``file:///mnt/kv``.
    nbytes : int, optional
        Budget; by default 64 GiB.
    key : str
        Environment variable with the key that signs entries, on every machine.
    """
    budget = nbytes or DEFAULT_DISK_BYTES
    if url.startswith(("redis:", "rediss:", "unix:")):
        return StoreConfig(
            host_bytes=0,
            redis_url=url,
            redis_bytes=budget,
            redis_entry_bytes=min(_LARGEST, budget),
            remote_key=key,
            remote_deadline=_PATIENCE,
        )
    return StoreConfig(host_bytes=0, bulk_url=url, bulk_bytes=budget, remote_key=key, bulk_deadline=_PATIENCE)
