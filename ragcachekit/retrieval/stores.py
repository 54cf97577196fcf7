"""What is known of the vector stores of both frameworks: their metric, and their state in any process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_METRICS = {
    **dict.fromkeys(("cosine", "cos"), "cosine"),
    **dict.fromkeys(("l2", "euclid", "euclidean", "euclidean_distance", "1"), "l2"),
    **dict.fromkeys(("ip", "dot", "inner", "inner_product", "max_inner_product", "dot_product", "0"), "ip"),
}
"""By the names that stores use, in lower case, and Faiss's numbers."""

_PARTS = ("VectorStoreIndex", "SimpleDocumentStore", "SimpleIndexStore", "SimpleKVStore")
"""What LlamaIndex keeps beside a vector store that holds the texts."""


def metric_of(store: Any) -> str | None:
    """The metric that a store searches by; None where it does not say."""
    metric = getattr(store, "distance_strategy", getattr(store, "_distance_strategy", None))
    with suppress(Exception):  # a server that cannot be reached
        metric = _metric(store, _kind(store)) or metric
    return _METRICS.get(str(getattr(metric, "value", metric)).lower())


def _metric(store: Any, kind: str) -> object:
    if kind == "chroma":
        settings = store._collection.configuration_json
        return next((one["space"] for name in ("hnsw", "spann") if (one := settings.get(name))), "l2")
    if kind == "qdrant":
        vectors = store.client.get_collection(store.collection_name).config.params.vectors
        return (vectors[store.vector_name] if isinstance(vectors, Mapping) else vectors).distance
    if kind == "FaissVectorStore":
        return str(store.client.metric_type)
    return "cosine" if kind in ("InMemoryVectorStore", "SimpleVectorStore") else None


def state_of(store: Any) -> object:
    """What every process reads from a store: its name, and a count or version; None where it has neither."""
    kind = _kind(store)
    if kind == "chroma":
        return str(store._collection.id), store._collection.count()
    if kind == "qdrant":
        made = store.client.init_options
        place = tuple(made[name] for name in ("location", "url", "host", "port", "path"))
        state = place, store.collection_name, store.client.count(store.collection_name).count
        return None if ":memory:" in place else state
    if kind == "DocumentIndex":
        return store.path and (str(store.path.resolve()), store.version)
    if kind == "RagCacheVectorStore":
        return state_of(store.index if hasattr(store, "index") else store.client)
    return () if kind in _PARTS else None


def _kind(store: object) -> str:
    """The store's system where both frameworks have classes for it, else the name of its class."""
    words = re.split(r"[._]", type(store).__module__)
    return next((kind for kind in ("chroma", "qdrant") if kind in words), type(store).__name__)
