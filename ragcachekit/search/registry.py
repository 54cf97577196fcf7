"""Vector indexes by name."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from ragcachekit.errors import RetrievalError
from ragcachekit.search.base import VectorIndex
from ragcachekit.search.manifest import read_index

_KINDS = {
    "brute": ("ragcachekit.search.brute", "BruteIndex"),
    "faiss-flat": ("ragcachekit.search.faiss_index", "FaissFlatIndex"),
    "faiss-ivf": ("ragcachekit.search.faiss_ivf", "FaissIvfIndex"),
    "faiss-hnsw": ("ragcachekit.search.faiss_index", "FaissHnswIndex"),
    "hnswlib": ("ragcachekit.search.hnswlib_index", "HnswlibIndex"),
}


def index_names() -> tuple[str, ...]:
    """The names that :func:`open_index` takes."""
    return tuple(sorted(_KINDS))


def open_index(name: str, dim: int, metric: str = "cosine", **options: Any) -> VectorIndex:
    """A new, empty index: one of :func:`index_names`, the width, and ``cosine``, ``l2`` or ``ip``.

    ``options`` are those of the implementation (``links``, ``ef_search``, ``probes`` ...). ValueError or
    TypeError for bad arguments; ImportError names the extra of a missing library.
    """
    if name not in _KINDS:
        raise ValueError(f"unknown index {name!r}; known: {', '.join(index_names())}")
    module, kind = _KINDS[name]
    made: VectorIndex = getattr(importlib.import_module(module), kind)(dim, metric, **options)
    return made


def load_index(path: str | os.PathLike[str], *, mmap: bool = False) -> VectorIndex:
    """The index that ``save`` wrote to ``path``; RetrievalError if a file is missing or damaged.

    ``mmap`` maps the vectors (and the graph) instead of reading them: Faiss's kinds can, ``brute`` and
    ``hnswlib`` raise ValueError. The file is read once for its checksum, and ids are always in memory.
    The first add or remove reads the rest. Processes that map the same file share its memory. Whoever cuts
    a mapped file short ends these processes; ``save`` never does.
    """
    manifest, data = read_index(Path(path))
    index = open_index(manifest.kind, manifest.dim, manifest.metric, **manifest.options)
    if mmap and not index.maps:
        raise ValueError(f"{manifest.kind} cannot map its file; leave mmap out, or use a kind of Faiss's")
    try:
        index.restore(data, manifest, mmap=mmap)
    except RuntimeError as error:  # what Faiss and hnswlib raise
        raise RetrievalError(f"cannot load the index {path}: {error}") from error
    return index
