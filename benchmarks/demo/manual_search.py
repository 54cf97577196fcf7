"""Search in the manual of the standard library: its chunks, their embeddings on disk, a Faiss index."""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from numpy.typing import NDArray
from pydantic import PrivateAttr, SkipValidation
from tqdm.auto import tqdm

from benchmarks.demo import manual
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.retrieval.index import VectorIndex, open_index

CHUNK, SEARCH = "chunk", "search"
"""Metadata of a found document: its place among the texts, and the number of the search that found it."""


class RememberedEmbeddings(Embeddings):
    """Other ``Embeddings``, and the vectors of questions that were embedded beforehand.

    Questions are asked several times here, and embedding is measured apart from the search.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self._known: dict[str, list[float]] = {}

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """As LangChain asks for it; nothing is remembered."""
        return self._embeddings.embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        """As LangChain asks for it."""
        known = self._known.get(text)
        return known if known is not None else self._embeddings.embed_query(text)

    def remember(self, texts: Sequence[str], progress: bool = False) -> None:
        """Embed questions one by one now, so that asking for them later takes no time."""
        for text in tqdm(texts, desc="embedding questions", unit="text", disable=not progress):
            self._known[text] = self._embeddings.embed_query(text)


class ManualRetriever(BaseRetriever):
    """Returns the ``k`` chunks nearest to a question.

    ``index`` holds the places of ``texts`` as ids; larger ids are fillers. Every search has a number, so that
    a document served from a query cache tells which search found it.
    """

    embeddings: SkipValidation[Any]
    index: SkipValidation[Any]
    texts: tuple[str, ...]
    k: int
    _searches: Any = PrivateAttr(default_factory=itertools.count)

    def cache_key_parts(self) -> int:
        """What results depend on: index and texts stay as they are."""
        return self.k

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        number = next(self._searches)
        found = self.index.search(self.embeddings.embed_query(query), self.k)
        return [
            Document(self.texts[place], id=str(place), metadata={CHUNK: place, SEARCH: number})
            for place in map(int, found.ids)
            if place < len(self.texts)
        ]


def manual_texts(tokenizer: Any, limit: int | None, size: int, names: Sequence[str] = ()) -> tuple[str, ...]:
    """The first ``limit`` chunks of at most ``size`` wordpieces, of all modules or of those in ``names``."""

    def count(text: str) -> int:
        return len(tokenizer(text, truncation=False, verbose=False).input_ids)

    found = manual.chunks(count, full=limit is None, limit=limit or 1, size=size, names=names)
    return tuple(chunk.text for chunk in found)


def manual_index(rows: NDArray[np.float32], vectors: int, seed: int) -> VectorIndex:
    """A flat Faiss index of ``rows`` ``[n, dim]`` and so many random unit vectors that it holds ``vectors``.

    A flat search reads every vector, whatever it holds. In hundreds of dimensions random vectors lie far from
    every question, so the fillers cost time and are not found.
    """
    index = open_index("faiss-flat", rows.shape[1])
    index.add(range(len(rows)), rows)
    more = max(0, vectors - len(rows))
    fillers = np.random.default_rng(seed).standard_normal((more, rows.shape[1]), dtype=np.float32)
    index.add(range(len(rows), len(rows) + more), fillers)
    return index


def cached_embeddings(
    embedder: MiniLM, texts: Sequence[str], cache_dir: Path, progress: bool = False
) -> NDArray[np.float32]:
    """Embeddings ``[n, dim]`` from the file named by embedder and texts, or computed and written there."""
    digest = hashlib.sha256(type(embedder).__qualname__.encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    path = cache_dir / f"manual-{digest.hexdigest()[:32]}.npy"
    rows = _read_rows(path, len(texts))
    if rows is None:
        rows = embedder.embed(texts, progress=progress)
        _write_rows(path, rows)
    return rows


def _read_rows(path: Path, count: int) -> NDArray[np.float32] | None:
    """What the file holds, or None where it is missing or damaged: it is computed again then."""
    try:
        rows = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = rows.dtype == np.float32 and rows.ndim == 2 and len(rows) == count and np.isfinite(rows).all()
    return rows if whole else None


def _write_rows(path: Path, rows: NDArray[np.float32]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        np.save(file, rows, allow_pickle=False)
    os.replace(file.name, path)
