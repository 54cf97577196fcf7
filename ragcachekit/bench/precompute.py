"""Encode a corpus ahead of the questions (EPIC's compile step): how much it is, and doing it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragcachekit.bench.corpus import Corpus
from ragcachekit.bench.own_files import OwnFiles
from ragcachekit.bench.precompute_manifest import Scope, read_manifests, write_manifest
from ragcachekit.bench.reading_prompt import prompt_for
from ragcachekit.bench.workspace import CacheFolder
from ragcachekit.config import StoreConfig
from ragcachekit.engine import RagCache
from ragcachekit.errors import StoreError
from ragcachekit.link.observed import ObservedCache
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
class PrecomputeSettings(OwnFiles):
    """What ``ragcachekit precompute`` is told.

    ``policy`` counts for the encoder that it asks for (``lego0``: ``sinks:4``); the other names must be
    the same in :class:`~ragcachekit.bench.ask.AskSettings` for the KV to be found.

    Attributes
    ----------
    keep_gone : bool
        Leave the KV of chunks that are gone from the corpus.
    """

    keep_gone: bool = False


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
    gone : int
        Chunks that earlier runs encoded, that are no longer in the corpus, and are to be forgotten.
    seconds : float or None
        Time for the others, from encoding a small sample; None if it was not measured.
    notes : tuple of str
        What of the corpus was skipped; what cannot be forgotten, and why.
    """

    files: int
    chunks: int
    tokens: int
    stored: int
    todo_tokens: int
    token_bytes: int
    gone: int
    seconds: float | None
    notes: tuple[str, ...]

    @property
    def todo_bytes(self) -> int:
        """Bytes of KV still to be stored."""
        return self.todo_tokens * self.token_bytes


@dataclass(frozen=True)
class Precomputed:
    """What one run did: chunks encoded, were there, forgotten; tokens encoded, bytes of KV, seconds."""

    encoded: int
    stored: int
    forgotten: int
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
    corpus, kv = settings.read_corpus(), settings.folder.kv

    def on_disk(key: KVKey) -> bool:  # opening a store would create its folder
        return (kv / f"{key.digest()}.safetensors").is_file()

    with tempfile.TemporaryDirectory(prefix="ragcachekit-") as scratch:
        store = _Watched(NullStore())
        with settings.open_engine(store, cache_dir=Path(scratch), cold="never") as rag:
            job = _Job(rag, corpus, store, settings)
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
    corpus, budget = settings.read_corpus(), settings.disk_bytes
    kept = open_store(StoreConfig(host_bytes=0, disk_path=settings.folder.kv, disk_bytes=budget))
    store = _Watched(kept)
    with closing(kept), settings.open_engine(store, cold="never") as rag:
        job = _Job(rag, corpus, store, settings)
        work, _ = job.work(kept.__contains__)
        needed = work.todo_bytes - sum(job.gone.values()) * work.token_bytes
        _check_room(needed, budget - sum(tier.nbytes for tier in kept.stats()), settings.folder)
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
        """Forget what is gone, encode what is missing; what was stored stays if this is interrupted.

        Raises
        ------
        StoreError
            Some KV, or the list of what is encoded, could not be written.
        """
        begun, store = time.perf_counter(), self._job.store
        self._job.forget_gone()
        self._job.encode(progress=progress)
        if store.failed:
            raise StoreError(
                f"{store.failed} of {store.failed + store.kept} chunks could not be stored; free some space "
                "and run the same command again"
            )
        seconds = time.perf_counter() - begun
        return Precomputed(store.kept, self.work.stored, self.work.gone, store.tokens, store.nbytes, seconds)


class _Job:
    """An engine, a corpus, the store between them, and what earlier runs are known to have encoded."""

    def __init__(self, rag: RagCache, corpus: Corpus, store: _Watched, settings: PrecomputeSettings) -> None:
        self.rag, self.corpus, self.store = rag, corpus, store
        self.system = prompt_for(rag.tokenizer).before
        tokens = SegmentTokenizer(rag.tokenizer)
        self._sizes = [len(tokens.chunk(text)) for text in corpus.texts]
        self._keys = self._all_keys()
        self._present = {key.chunk_id: size for key, size in zip(self._keys, self._sizes, strict=True)}
        self._folder, self._scope = settings.folder.manifests, _scope(settings, rag, self._keys)
        self._known = read_manifests(self._folder, self._scope)
        self.gone = {} if settings.keep_gone else self._known.gone(self._present)

    def encode(self, texts: list[str] | None = None, *, progress: bool = False) -> None:
        """All texts, or these."""
        self.rag.encode(texts or self.corpus.texts, system=self.system, progress=progress)

    def forget_gone(self) -> None:
        """Drop what is gone, and note all that is then stored or about to be.

        In this order, and before anything is encoded: whenever this is interrupted, what is stored is
        listed, so that a later run can forget it.
        """
        if self.gone:
            self.rag.forget(self.gone)
        listed = {id: n for id, n in self._known.chunks.items() if not self._settled(id)}
        write_manifest(self._folder, self._scope, {**listed, **self._present})

    def _settled(self, id: str) -> bool:
        """Whether another manifest lists it, or it was forgotten just now: not this one's any more."""
        return id in self.gone or id in self._known.elsewhere

    def work(self, stored: Callable[[KVKey], bool]) -> tuple[Work, list[str]]:
        """What there is to do, and the texts that it is about; computes nothing yet."""
        todo = [i for i, key in enumerate(self._keys) if not stored(key)]
        work = Work(
            self.corpus.files,
            len(self._sizes),
            sum(self._sizes),
            len(self._sizes) - len(todo),
            sum(self._sizes[i] for i in todo),
            token_bytes(self.rag.model),
            len(self.gone),
            None,
            (*self.corpus.notes, *self._known.notes),
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

    def _all_keys(self) -> list[KVKey]:
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


def _scope(settings: PrecomputeSettings, rag: RagCache, keys: Sequence[KVKey]) -> Scope:
    corpus = str(Path(settings.corpus).expanduser().resolve())
    encoder = keys[0].encoding.partition("@")[0]
    return Scope(rag.namespace, corpus, encoder, rag.fingerprint, settings.chunk_tokens)


def _check_room(needed: int, room: int, folder: CacheFolder) -> None:
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
