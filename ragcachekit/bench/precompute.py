"""Encode a corpus ahead of the questions (EPIC's compile step): how much it is, and doing it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
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
from ragcachekit.link.observed import ObservedCache
from ragcachekit.link.policies import open_policy
from ragcachekit.model.encoder import ChunkEncoder, Encoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope_probe import describe_rope
from ragcachekit.model.tokens import SegmentTokenizer
from ragcachekit.store.base import Found, KVStore, LayerSource, StoreStats
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
    CorpusError, RagCacheError, ModelNotSupported, ValueError
        As :func:`open_run`.
    """
    corpus, kv = _corpus(settings), CacheFolder.at(settings.cache).kv

    def on_disk(key: KVKey) -> bool:  # opening a store would create its folder
        return (kv / f"{key.digest()}.safetensors").is_file()

    with tempfile.TemporaryDirectory(prefix="ragcachekit-") as scratch:
        store = _Watched(NullStore())
        with _engine(settings, store, Path(scratch)) as rag:
            job = _Job(rag, corpus, store)
            work, todo = job.work(on_disk)
            return replace(work, seconds=job.seconds_per_token(todo) * work.todo_tokens) if todo else work


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
    corpus, folder, budget = _corpus(settings), CacheFolder.at(settings.cache), disk_bytes(settings.disk_gb)
    kept = open_store(StoreConfig(host_bytes=0, disk_path=folder.kv, disk_bytes=budget))
    store = _Watched(kept)
    with closing(kept), _engine(settings, store, folder.path) as rag:
        job = _Job(rag, corpus, store)
        work, _ = job.work(kept.__contains__)
        _check_room(work, budget - sum(tier.nbytes for tier in kept.stats()), folder)
        yield PrecomputeRun(job, work)


class PrecomputeRun:
    """A corpus ready to be encoded.

    Attributes
    ----------
    work : Work
    """

    def __init__(self, job: _Job, work: Work) -> None:
        self._job = job
        self.work = work

    def run(self, *, progress: bool = False) -> Precomputed:
        """Encode what is missing; what was stored stays if this is interrupted.

        Raises
        ------
        StoreError
            Some KV could not be written.
        """
        begun, store = time.perf_counter(), self._job.store
        self._job.encode(progress=progress)
        if store.failed:
            raise StoreError(
                f"{store.failed} of {store.failed + store.kept} chunks could not be stored; free some space "
                "and run the same command again"
            )
        seconds = time.perf_counter() - begun
        return Precomputed(store.kept, self.work.stored, store.tokens, store.nbytes, seconds)


class _Job:
    """An engine, a corpus, and the store between them."""

    def __init__(self, rag: RagCache, corpus: Corpus, store: _Watched) -> None:
        self.rag, self.corpus, self.store = rag, corpus, store
        self.system = prompt_for(rag.tokenizer).before

    def encode(self, texts: list[str] | None = None, *, progress: bool = False) -> None:
        """All texts, or these."""
        self.rag.encode(texts or self.corpus.texts, system=self.system, progress=progress)

    def work(self, stored: Callable[[KVKey], bool]) -> tuple[Work, list[str]]:
        """What there is to do, and the texts that it is about; computes nothing yet."""
        tokens = SegmentTokenizer(self.rag.tokenizer)
        sizes = [len(tokens.chunk(text)) for text in self.corpus.texts]
        todo = [i for i, key in enumerate(self._keys()) if not stored(key)]
        done = len(sizes) - len(todo)
        work = Work(
            self.corpus.files,
            len(sizes),
            sum(sizes),
            done,
            sum(sizes[i] for i in todo),
            token_bytes(self.rag.model),
            None,
            self.corpus.notes,
        )
        return work, [self.corpus.texts[i] for i in todo]

    def seconds_per_token(self, texts: list[str]) -> float:
        """Encode up to :data:`SAMPLE_TOKENS` of the texts, into a store that keeps nothing."""
        self.encode(texts[:1])  # a model's first forward is slower than the others
        sample, tokens = list[str](), 0
        while len(sample) < len(texts) and tokens < SAMPLE_TOKENS:
            sample.append(texts[len(sample)])
            tokens += self.rag.count_tokens(sample[-1])
        begun = time.perf_counter()
        self.encode(sample)
        return (time.perf_counter() - begun) / tokens

    def _keys(self) -> list[KVKey]:
        with self.store.pretending() as keys:
            self.encode()
        return keys


class _Watched:
    """A store that counts what is put into it, and can pretend to hold everything already."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._asked: list[KVKey] | None = None
        self.kept = self.failed = self.tokens = self.nbytes = 0

    @contextmanager
    def pretending(self) -> Iterator[list[KVKey]]:
        """Meanwhile nothing is encoded: the list fills with the keys that would be."""
        self._asked = []
        try:
            yield self._asked
        finally:
            self._asked = None

    def __contains__(self, key: KVKey) -> bool:
        if self._asked is None:
            return key in self._store
        self._asked.append(key)
        return True

    def get(self, key: KVKey, worth: float = 1.0) -> Found | None:
        """As the store."""
        return self._store.get(key, worth)

    def open(self, key: KVKey, worth: float = 1.0) -> Found | LayerSource | None:
        """As the store."""
        return self._store.open(key, worth)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """As the store, counted."""
        kept = self._store.put(key, kv)
        self.kept += kept
        self.failed += not kept
        self.tokens += kv.tokens if kept else 0
        self.nbytes += kv.nbytes if kept else 0
        return kept

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """As the store."""
        return self._store.forget(namespace, chunk_ids)

    def stats(self) -> tuple[StoreStats, ...]:
        """As the store."""
        return self._store.stats()

    def close(self) -> None:
        """As the store."""
        self._store.close()


def token_bytes(model: Any) -> int:
    """KV of one token over all layers, read off the KV of one token (layers may differ in width)."""
    encoder = ChunkEncoder(model, describe_rope(model), ObservedCache)
    ((_, kv),) = encoder.encode([[1]], Encoding("standalone"))
    return kv.nbytes


def _corpus(settings: PrecomputeSettings) -> Corpus:
    tokenizer = load_tokenizer(settings.model)
    return read_corpus(settings.corpus, chunk_tokens=settings.chunk_tokens, tokenizer=tokenizer)


def _engine(settings: PrecomputeSettings, store: _Watched, cache_dir: Path) -> RagCache:
    with explained(settings.model):
        return RagCache.from_pretrained(
            model_path(settings.model),
            device=settings.device,
            policy=settings.policy,
            encoder=settings.encoder,
            store=store,
            namespace=settings.namespace,
            cold="never",
            cache_dir=cache_dir,
            dtype=settings.dtype,
        )


def _check_room(work: Work, room: int, folder: CacheFolder) -> None:
    needed = work.todo_bytes
    if needed > room:
        raise ValueError(
            f"the KV takes {needed / 1e9:.2f} GB more, the disk budget has {max(room, 0) / 1e9:.2f} GB left; "
            "raise --disk-gb, here and in `ask`, or clear what is not needed (ragcachekit cache clear)"
        )
    free = shutil.disk_usage(folder.kv).free
    if needed > free:
        raise StoreError(
            f"the KV takes {needed / 1e9:.2f} GB, {folder.path} has {free / 1e9:.2f} GB free; "
            "free some space or choose another --cache"
        )
