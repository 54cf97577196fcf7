"""Options of an engine: types for callers, defaults, and the checks that need no model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypedDict

from ragcachekit.config import (
    LoadConfig,
    QueueConfig,
    ShadowConfig,
    StoreConfig,
    TreeConfig,
    check_type,
)
from ragcachekit.plan.companions import Neighbours
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.base import KVStore


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of :class:`ragcachekit.RagCache`, which describes them."""

    policy: str | SelectionPolicy
    encoder: str | None
    neighbours: Neighbours | Mapping[str, Neighbours] | None
    companions: Literal["any", "same-source"]
    store: StoreConfig | KVStore | None
    namespace: str
    cold: Literal["background", "now", "never"]
    encode_after: int
    shadow: float | ShadowConfig | None
    load: Literal["auto", "always"] | LoadConfig
    tree: TreeConfig | KnowledgeTree | None
    queue: QueueConfig | None
    cache_dir: str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The options with their defaults, checked as far as possible without a model."""

    policy: str | SelectionPolicy = "auto"
    encoder: str | None = None
    neighbours: Neighbours | Mapping[str, Neighbours] | None = None
    companions: Literal["any", "same-source"] = "any"
    store: StoreConfig | KVStore | None = None
    namespace: str = "default"
    cold: Literal["background", "now", "never"] = "background"
    encode_after: int = 2
    shadow: float | ShadowConfig | None = None
    load: Literal["auto", "always"] | LoadConfig = "auto"
    tree: TreeConfig | KnowledgeTree | None = None
    queue: QueueConfig | None = None
    cache_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.cold not in ("background", "now", "never"):
            raise ValueError(f"cold must be 'background', 'now' or 'never', got {self.cold!r}")
        if self.companions not in ("any", "same-source"):
            raise ValueError(f"companions must be 'any' or 'same-source', got {self.companions!r}")
        check_type("encode_after", self.encode_after, int, "a number of misses such as 2")
        if self.encode_after < 1:
            raise ValueError(f"encode_after must be at least 1 miss, got {self.encode_after}")
        none = type(None)
        check_type("encoder", self.encoder, (str, none), "a name such as 'system', or None")
        stores = "StoreConfig(disk_path='~/kv', ...), an open KVStore, or None for 4 GiB of host memory"
        check_type("store", self.store, (StoreConfig, KVStore, none), stores)
        share = "a share of the requests such as 0.02, or None"
        check_type("shadow", self.shadow, (Real, ShadowConfig, none), share)
        check_type(
            "tree", self.tree, (TreeConfig, KnowledgeTree, none), "TreeConfig(host_bytes=...), or None"
        )
        check_type("queue", self.queue, (QueueConfig, none), "QueueConfig(max_batch=16, ...), or None")
        check_type("cache_dir", self.cache_dir, (str, os.PathLike, none), "a folder's path, or None")


def checked_namespace(namespace: str) -> str:
    """The namespace; ValueError for an empty one, or one that is no text."""
    if not isinstance(namespace, str) or not namespace:
        raise ValueError(f"namespace must be a non-empty string, got {namespace!r}")
    namespace.encode()  # of a lone surrogate it raises UnicodeEncodeError, a ValueError
    return namespace
