"""Encode a corpus ahead of the questions (EPIC's compile step): how much it is, and doing it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcachekit.bench.corpus import DEFAULT_CHUNK_TOKENS, Corpus, read_corpus
from ragcachekit.bench.reading_prompt import prompt_for
from ragcachekit.bench.workspace import (
    CacheFolder,
    check_dtype,
    disk_bytes,
    explained,
    load_tokenizer,
    model_path,
)
from ragcachekit.config import StoreConfig
from ragcachekit.engine import RagCache
from ragcachekit.errors import StoreError
from ragcachekit.link.policies import open_policy
from ragcachekit.model.encoder import ChunkEncoder, Encoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope import describe_rope
from ragcachekit.model.tokens import SegmentTokenizer
from ragcachekit.store.base import Found, KVStore, StoreStats
from ragcachekit.store.factory import open_store
from ragcachekit.store.null import NullStore
from ragcachekit.types import KVKey

SAMPLE_TOKENS = 1024
"""Tokens that a dry run encodes to measure the speed."""


@dataclass(frozen=True)
class PrecomputeSettings:
    """What ``ragcachekit precompute`` is told; checked before anything is loaded.

    ``policy`` counts for the encoder that it asks for (``lego0``: ``sinks:4``); the other names are as
    in :class:`~ragcachekit.bench.ask.AskSettings`, and must be the same there for the KV to be found.
    """

    corpus: str
    model: str
    policy: str = "lego:16"
    encoder: str | None = None
    cache: str | None = None
    namespace: str = "default"
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    device: str | None = None
    dtype: str = "auto"
    disk_gb: float | None = None

    def __post_init__(self) -> None:
        open_policy(self.policy)
        check_dtype(self.dtype)
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")


@dataclass(frozen=True)
class Work:
    """How much there is to do.

    Attributes
    ----------
    files, chunks, tokens : int
        Of the corpus.
    stored : int
        Chunks whose KV is stored already.
    todo_tokens : int
        Tokens of the others.
    token_bytes : int
        KV of one token, all layers, as the model gives it.
    seconds : float or None
        Time for the others, from encoding a small sample; None if it was not measured.
    notes : tuple of str
        What of the corpus was skipped.
    """

    files: int
    chunks: int
    tokens: int
    stored: int
    todo_tokens: int
    token_bytes: int
    seconds: float | None
    notes: tuple[str, ...]

    @property
    def todo_bytes(self) -> int:
        """Bytes of KV still to be stored."""
        return self.todo_tokens * self.token_bytes


@dataclass(frozen=True)
class Precomputed:
    """What one run did: chunks encoded, chunks that were there, tokens encoded, bytes of KV, seconds."""

    encoded: int
    stored: int
    tokens: int
    nbytes: int
    seconds: float


def estimate(settings: PrecomputeSettings) -> Work:
    """Measure the work and leave the cache folder as it is (the dry run).

    Raises
    ------
    As :func:`run`.
    """
    folder = CacheFolder.at(settings.cache)
    corpus = _corpus(settings)
    with tempfile.TemporaryDirectory(prefix="ragcachekit-") as scratch:
        store = _Ledger(folder.kv)
        with _engine(settings, store, Path(scratch)) as rag:
            work, todo = _work(rag, corpus, store)
            store.pretend = False
            sample = _sample(todo, rag)
            if not sample:
                return work
            rag.encode(sample[:1], system=_system(rag))  # the first forward is slower than the others
            begun, before = time.perf_counter(), store.tokens
            rag.encode(sample, system=_system(rag))
            per_token = (time.perf_counter() - begun) / (store.tokens - before)
    return Work(**{**vars(work), "seconds": per_token * work.todo_tokens})


@contextmanager
def open_run(settings: PrecomputeSettings) -> Iterator[PrecomputeRun]:
    """Load everything for a run; :attr:`PrecomputeRun.work` says how much it will be.

    Raises
    ------
    CorpusError, RagCacheError, ModelNotSupported, StoreError
        The corpus, the model or the cache folder cannot be used, or the KV would not fit.
    ValueError
        A setting is wrong, or a chunk is longer than the model's context.
    """
    folder = CacheFolder.at(settings.cache)
    corpus = _corpus(settings)
    budget = disk_bytes(settings.disk_gb)
    store = _Tally(open_store(StoreConfig(host_bytes=0, disk_path=folder.kv, disk_bytes=budget)))
    try:
        with _engine(settings, store, folder.path) as rag:
            work, _ = _work(rag, corpus, _Ledger(folder.kv))
            _check_room(work, budget, folder)
            yield PrecomputeRun(rag, corpus, store, work)
    finally:
        store.close()


class PrecomputeRun:
    """A corpus ready to be encoded.

    Attributes
    ----------
    work : Work
    """

    def __init__(self, rag: RagCache, corpus: Corpus, store: _Tally, work: Work) -> None:
        self._rag, self._corpus, self._store = rag, corpus, store
        self.work = work

    def run(self, *, progress: bool = False) -> Precomputed:
        """Encode what is missing; what was stored stays if this is interrupted.

        Raises
        ------
        StoreError
            Some KV could not be written.
        """
        begun = time.perf_counter()
        self._rag.encode(self._corpus.texts, system=_system(self._rag), progress=progress)
        store = self._store
        if store.failed:
            raise StoreError(
                f"{store.failed} of {store.failed + store.kept} chunks could not be stored; free some space, "
                "or raise --disk-gb, and run the same command again"
            )
        return Precomputed(
            store.kept, self.work.stored, store.tokens, store.nbytes, time.perf_counter() - begun
        )


def run(settings: PrecomputeSettings, *, progress: bool = False) -> Precomputed:
    """:func:`open_run` and :meth:`PrecomputeRun.run` in one."""
    with open_run(settings) as opened:
        return opened.run(progress=progress)


def token_bytes(model: Any) -> int:
    """KV of one token over all layers, from the KV of one token (layers may differ in width)."""
    ((_, kv),) = ChunkEncoder(model, describe_rope(model)).encode([[1]], Encoding("standalone"))
    return kv.nbytes


class _Ledger(NullStore):
    """Keeps nothing; while ``pretend`` is set it claims to hold everything and notes what it is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.pretend = True
        self.asked: list[KVKey] = []
        self.tokens = 0

    def __contains__(self, key: KVKey) -> bool:
        self.asked.append(key)
        return self.pretend

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        self.tokens += kv.tokens
        return super().put(key, kv)

    def on_disk(self, key: KVKey) -> bool:
        """Whether the folder holds a file for ``key``; opening the store would create the folder."""
        return (self._folder / f"{key.digest()}.safetensors").is_file()


class _Tally:
    """Counts what goes into a store."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.kept = self.failed = self.tokens = self.nbytes = 0

    def get(self, key: KVKey) -> Found | None:
        return self._store.get(key)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        kept = self._store.put(key, kv)
        self.kept += kept
        self.failed += not kept
        self.tokens += kv.tokens if kept else 0
        self.nbytes += kv.nbytes if kept else 0
        return kept

    def __contains__(self, key: KVKey) -> bool:
        return key in self._store

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        return self._store.forget(namespace, chunk_ids)

    def stats(self) -> tuple[StoreStats, ...]:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()
