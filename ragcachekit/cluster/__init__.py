"""Ray: encoding a corpus on many machines, and serving with requests routed by their chunks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ragcachekit.errors import missing_extra

if TYPE_CHECKING:
    from ragcachekit.cluster.app import AppSettings, build_app
    from ragcachekit.cluster.precompute import EncodingJob, encode_chunks
    from ragcachekit.cluster.router import ChunkRouter
    from ragcachekit.cluster.shared_tier import shared_tier

_WHERE = {
    "AppSettings": "app",
    "ChunkRouter": "router",
    "EncodingJob": "precompute",
    "build_app": "app",
    "encode_chunks": "precompute",
    "shared_tier": "shared_tier",
}

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
