"""Embeddings of questions that repeat exactly: each is computed once."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ragcachekit.config import positive
from ragcachekit.json_store import JsonStore
from ragcachekit.query.base import LogOnce
from ragcachekit.query.metrics import Float64

log = logging.getLogger(__name__)

_PREFIX = "embedding:"
_ROOM = 8  # a store is cut back to the capacity when it holds an eighth more


class EmbeddingCacheStats(NamedTuple):
    """Embeddings in memory, and questions answered from memory, from disk and by the embedder."""

    entries: int
    memory_hits: int
    disk_hits: int
    misses: int


class EmbeddingCache:
    """Text -> embedding of one embedder, least recently used out first. Thread safe; no lock while embedding.

    Two threads that ask the same new question at the same time may both embed it. What cannot be used, such
    as NaN, is returned and not kept; what the embedder raises is passed on. A failing disk is logged once.

    Parameters
    ----------
    embedder : str
        Identity of the embedder: model, version, and whatever else changes its vectors. Another name is
        another cache.
    capacity : int
        Embeddings in memory, and at most an eighth more on disk, where the oldest go first.
    store : JsonStore, optional
        Keeps them over a restart, for all processes of the machine. It may also hold :class:`SavedEntries`.

    Raises
    ------
    ValueError, TypeError
        For bad settings.
    """

    def __init__(self, embedder: str, capacity: int = 10_000, store: JsonStore | None = None) -> None:
        if not isinstance(embedder, str) or not embedder:
            raise ValueError(f"embedder must name the embedding model, got {embedder!r}")
        self._embedder, self._capacity, self._store = embedder, positive("capacity", capacity), store
        self._rows: OrderedDict[str, Float64] = OrderedDict()
        self._memory_hits = self._disk_hits = self._misses = self._stored = 0
        self._warn = LogOnce(log)
        self._lock = threading.Lock()

    def embed(self, text: str, embed: Callable[[str], ArrayLike]) -> Float64:
        """The embedding of ``text``, float64 ``[dim]`` and read-only; by ``embed(text)`` unless cached."""
        found = self.get(text)
        return self._kept(text, embed(text)) if found is None else found

    async def aembed(self, text: str, embed: Callable[[str], Awaitable[ArrayLike]]) -> Float64:
        """:meth:`embed` with a coroutine function."""
        if self._store is None:
            found = self.get(text)
            return self._kept(text, await embed(text)) if found is None else found
        found = await asyncio.to_thread(self.get, text)  # the disk may be slow, or locked by another process
        return await asyncio.to_thread(self._kept, text, await embed(text)) if found is None else found

    def get(self, text: str) -> Float64 | None:
        """The embedding of ``text`` if it is cached."""
        with self._lock:
            row = self._rows.get(text)
            if row is not None:
                self._rows.move_to_end(text)
                self._memory_hits += 1
                return row
        row = self._loaded(text)
        with self._lock:
            self._disk_hits += row is not None
            self._misses += row is None
            if row is not None:
                self._remember(text, row)
        return row

    def clear(self) -> None:
        """Drop this cache's memory, and the embeddings of all embedders on disk; OSError if that fails."""
        with self._lock:
            self._rows.clear()
        if self._store is not None:
            self._store.delete(self._store.keys(_PREFIX))

    def stats(self) -> EmbeddingCacheStats:
        """Counters since the cache was made, and present content."""
        with self._lock:
            return EmbeddingCacheStats(len(self._rows), self._memory_hits, self._disk_hits, self._misses)

    def _kept(self, text: str, embedding: ArrayLike) -> Float64:
        row = np.array(embedding, np.float64)
        row.flags.writeable = False
        if row.ndim != 1 or not row.size or not np.isfinite(row).all():
            return row
        with self._lock:
            self._remember(text, row)
            self._stored += 1
            full = (self._stored - 1) % max(1, self._capacity // _ROOM) == 0
        if self._store is not None:
            try:
                self._store.put({self._key(text): _encoded(row)})
                if full:
                    stored = self._store.keys(_PREFIX)
                    self._store.delete(stored[: max(0, len(stored) - self._capacity)])
            except OSError as error:
                self._warn(f"embeddings of questions are kept in memory only: {error}")
        return row

    def _remember(self, text: str, row: Float64) -> None:
        self._rows[text] = row
        self._rows.move_to_end(text)
        if len(self._rows) > self._capacity:
            self._rows.popitem(last=False)

    def _loaded(self, text: str) -> Float64 | None:
        value = None if self._store is None else self._store.get(self._key(text))
        try:
            return None if value is None else _decoded(value)
        except (KeyError, TypeError, ValueError) as error:
            self._warn(f"an embedding on disk is damaged and computed again: {error!r}")
            return None

    def _key(self, text: str) -> str:
        named = json.dumps([self._embedder, text])  # ASCII, surrogates included
        return _PREFIX + hashlib.sha256(named.encode()).hexdigest()


def _encoded(row: Float64) -> dict[str, str]:
    """Base64 in float32 if that loses nothing, as for most models, else in float64."""
    with np.errstate(over="ignore"):
        narrow = row.astype("<f4")
    kept, kind = (narrow, "<f4") if np.array_equal(narrow, row) else (row.astype("<f8"), "<f8")
    return {"type": kind, "row": base64.b64encode(kept.tobytes()).decode()}


def _decoded(value: dict[str, str]) -> Float64:
    if value["type"] not in ("<f4", "<f8"):
        raise ValueError(f"an embedding of type {value['type']!r}")
    row = np.frombuffer(base64.b64decode(value["row"], validate=True), value["type"]).astype(np.float64)
    if not row.size or not np.isfinite(row).all():
        raise ValueError("an embedding without numbers")
    row.flags.writeable = False
    return row
