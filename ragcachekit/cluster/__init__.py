"""Ray: encoding a corpus on many machines, and serving with requests routed by their chunks."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ragcachekit.config import DEFAULT_DISK_BYTES, StoreConfig
from ragcachekit.errors import missing_extra

if TYPE_CHECKING:
    from ragcachekit.cluster.app import AppSettings, build_app
    from ragcachekit.cluster.precompute import EncodingJob, encode_chunks
    from ragcachekit.cluster.router import ChunkRouter

_WHERE = {
    "AppSettings": "app",
    "ChunkRouter": "router",
    "EncodingJob": "precompute",
    "build_app": "app",
    "encode_chunks": "precompute",
}

KEY = "RAGCACHEKIT_KEY"
"""Environment variable with the key that signs entries, by default."""

_PATIENCE = 60.0  # seconds; no request waits for a write in bulk
_MAX_ENTRY_BYTES = 256 << 20

__all__ = ["AppSettings", "ChunkRouter", "EncodingJob", "build_app", "encode_chunks", "shared_tier"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import ray  # noqa: F401
    except ImportError as error:
        install = missing_extra("ray", "'ray[data,serve]'")
        raise ImportError(f"ragcachekit.cluster needs Ray: {install}") from error
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def shared_tier(url: str, nbytes: int | None = None, key: str = KEY, *, host_bytes: int = 0) -> StoreConfig:
    """The configuration of a tier that processes share.

    Parameters
    ----------
    url : str
        ``redis://host:port/0`` (``rediss://``, ``unix://``), or a folder of any fsspec file system:
        ``s3://bucket/kv``, ``file:///mnt/kv``.
    nbytes : int, optional
        Its budget; by default 64 GiB. That of Redis is the server's ``maxmemory``.
    key : str
        Environment variable with the key that signs entries, on every machine.
    host_bytes : int
        Budget of the process's own memory tier. Without one, the tier is for writing a corpus: no request
        waits, and operations may take a minute.
    """
    if url.startswith(("redis:", "rediss:", "unix:")):
        config = StoreConfig(redis_url=url, redis_entry_bytes=_MAX_ENTRY_BYTES, remote_key=key)
    else:
        config = StoreConfig(bulk_url=url, bulk_bytes=nbytes or DEFAULT_DISK_BYTES, remote_key=key)
    if host_bytes:
        return replace(config, host_bytes=host_bytes)
    return replace(config, host_bytes=0, remote_deadline=_PATIENCE, bulk_deadline=_PATIENCE)
