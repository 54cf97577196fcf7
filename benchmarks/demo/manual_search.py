"""Search in the manual of the standard library: its chunks, their embeddings on disk, a Faiss index."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from numpy.typing import NDArray
from pydantic import SkipValidation

from benchmarks.demo import manual
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.search.registry import open_index

RETRIEVED = 40
"""Chunks that are searched for; as many of the best as fit go into the prompt."""


class ManualRetriever(BaseRetriever):
    """Searches the chunks by embedding; returns the nearest, without those that would not fit any more.

    Attributes
    ----------
    embedder : MiniLM
    index : VectorIndex
        Its ids are places in ``texts``.
    texts : tuple of str
    room : int
        Most tokens of all returned chunks together, as ``count`` counts them.
    count : callable
    """

    embedder: SkipValidation[Any]
    index: SkipValidation[Any]
    texts: tuple[str, ...]
    room: int
    count: SkipValidation[Callable[[str], int]]

    def cache_key_parts(self) -> int:
        """What results depend on: index and texts stay as they are."""
        return self.room

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
    ) -> list[Document]:
        found = self.index.search(self.embedder.embed_query(query), min(RETRIEVED, len(self.texts)))
        fitting: list[Document] = []
        left = self.room
        for number in found.ids:
            text = self.texts[int(number)]
            tokens = self.count(text)
            if tokens <= left:
                left -= tokens
                fitting.append(Document(text, id=str(number)))
        return fitting


def manual_texts(tokenizer: Any, full: bool, limit: int = manual.DEFAULT_CHUNKS) -> tuple[str, ...]:
    """The manual's chunks of at most 256 wordpieces of ``tokenizer``, special ones included."""

    def count(text: str) -> int:
        return len(tokenizer(text, truncation=False, verbose=False).input_ids)

    return tuple(chunk.text for chunk in manual.chunks(count, full=full, limit=limit))


def manual_retriever(
    embedder: MiniLM, texts: tuple[str, ...], room: int, cache_dir: Path, progress: bool = False
) -> ManualRetriever:
    """A LangChain retriever over a Faiss index of the texts, whose results have at most ``room`` tokens.

    Raises
    ------
    ValueError
        If there are no texts, or a chunk may not fit.
    """
    if not texts:
        raise ValueError("there are no texts to search in")
    if room < manual.MAX_WORDPIECES:
        raise ValueError(f"room must be at least {manual.MAX_WORDPIECES} tokens, one chunk, got {room}")
    rows = cached_embeddings(embedder, texts, cache_dir, progress)
    index = open_index("faiss-flat", rows.shape[1])
    index.add(range(len(texts)), rows)
    return ManualRetriever(
        embedder=embedder, index=index, texts=texts, room=room, count=bare_count(embedder.tokenizer)
    )


def bare_count(tokenizer: Any) -> Callable[[str], int]:
    """Tokens of a text without special ones."""
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


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
