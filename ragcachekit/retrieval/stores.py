"""What is known of the vector stores of both frameworks: their metric, and their state in any process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any

_METRICS = {
    **dict.fromkeys(("cosine", "cos"), "cosine"),
    **dict.fromkeys(("l2", "euclid", "euclidean", "euclidean_distance"), "l2"),
    **dict.fromkeys(("ip", "dot", "inner", "inner_product", "max_inner_product", "dot_product"), "ip"),
}
"""By the names that stores use, in lower case."""


def _of_chroma(store: Any) -> object:
    settings = store._collection.configuration_json
    return next((one["space"] for name in ("hnsw", "spann") if (one := settings.get(name))), "l2")


def _of_qdrant(store: Any) -> object:
    vectors = store.client.get_collection(store.collection_name).config.params.vectors
    if isinstance(vectors, Mapping):
        vectors = vectors.get(getattr(store, "vector_name", ""))
    return getattr(vectors, "distance", None)


_STRATEGIES: Mapping[str, Callable[[Any], object]] = {
    "chroma": _of_chroma,
    "qdrant": _of_qdrant,
    "FaissVectorStore": lambda store: {0: "ip", 1: "l2"}.get(store.client.metric_type),
    "InMemoryVectorStore": lambda _: "cosine",
    "SimpleVectorStore": lambda _: "cosine",
}

_CONTENT: Mapping[str, Callable[[Any], object]] = {
    "InMemoryVectorStore": lambda store: [
        (name, one["text"], one["metadata"]) for name, one in store.store.items()
    ],
    "SimpleVectorStore": lambda store: (store.data.text_id_to_ref_doc_id, store.data.metadata_dict),
    "SimpleKVStore": lambda store: store._collections_mappings,
    "VectorStoreIndex": lambda index: index.index_struct.nodes_dict,
    **dict.fromkeys(("SimpleDocumentStore", "SimpleIndexStore"), lambda _: ()),  # parts of it are stores
    "FaissVectorStore": lambda store: store.client.ntotal,
    "FAISS": lambda store: (store.index.ntotal, store.index_to_docstore_id, store.docstore._dict),
}
"""What stores hold in memory, without vectors: another embedding model has another name."""


def metric_of(store: Any) -> str | None:
    """The metric that a store searches by; None where it does not say."""
    strategy = getattr(store, "distance_strategy", getattr(store, "_distance_strategy", None))
    with suppress(Exception):  # a server that cannot be reached
        strategy = _STRATEGIES[_kind(store)](store)
    return _METRICS.get(str(getattr(strategy, "value", strategy)).lower())


def state_of(store: Any) -> object:
    """A count or version of its own, or a function that digests its content; None where it has neither.

    A change that keeps the count is not seen.
    """
    kind = _kind(store)
    if kind == "chroma":
        model = store._collection.get_model()
        return str(model.id), store._collection.count(), model.version, model.log_position
    if kind == "qdrant":
        return store.collection_name, store.client.count(store.collection_name).count
    if kind == "RagCacheVectorStore":
        own = store.index if hasattr(store, "index") else store.client
        return own.path and (lambda: str(own.path.resolve()))  # its version is in keys anyway
    if kind == "DocumentIndex":
        return store.path and (lambda: (str(store.path.resolve()), store.version))
    if kind in _CONTENT:
        return lambda: sha256(json.dumps(_CONTENT[kind](store), default=repr).encode()).hexdigest()
    return None


def _kind(store: object) -> str:
    """The store's system where both frameworks have classes for it, else the name of its class."""
    words = re.split(r"[._]", type(store).__module__)
    return next((kind for kind in ("chroma", "qdrant") if kind in words), type(store).__name__)
