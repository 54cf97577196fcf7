"""Encode a corpus ahead of the questions (EPIC's compile step): how much it is, and doing it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ragcachekit.commands.ask import Say, corpus_index
from ragcachekit.commands.checks import check_writable
from ragcachekit.commands.embedding import MiniLM, model_folder
from ragcachekit.commands.own_files import OwnFiles
from ragcachekit.commands.precompute.job import Job, Work
from ragcachekit.commands.precompute.store import WatchedStore
from ragcachekit.commands.workspace import CacheFolder
from ragcachekit.config import StoreConfig
from ragcachekit.errors import StoreError
from ragcachekit.store.entry.file import entry_name
from ragcachekit.store.factory import open_store
from ragcachekit.store.null import NullStore
from ragcachekit.types import KVKey


@dataclass(frozen=True)
class PrecomputeSettings(OwnFiles):
    """What ``ragcachekit precompute`` is told.

    ``policy`` counts for the encoder that it asks for (``lego0``: ``sinks:4``); the other names must be
    the same in :class:`~ragcachekit.commands.ask.AskSettings` for the KV to be found.

    Attributes
    ----------
    keep_gone : bool
        Leave the KV of chunks that are gone from the corpus.
    """

    keep_gone: bool = False


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

    Raises CorpusError, RagCacheError, ModelNotSupported, ValueError as :func:`open_run`.
    """
    corpus, kv = settings.read_corpus(), settings.folder.kv

    def on_disk(key: KVKey) -> bool:  # opening a store would create its folder
        return (kv / entry_name(key.digest())).is_file()

    with tempfile.TemporaryDirectory(prefix="ragcachekit-") as scratch:
        store = WatchedStore(NullStore())
        with settings.open_engine(store, corpus, cache_dir=Path(scratch), cold="never") as rag:
            job = Job(rag, corpus, store, settings, keep_gone=settings.keep_gone)
            work, todo = job.work(on_disk)
            return replace(work, seconds=job.seconds_per_token(todo) * work.todo_tokens) if todo else work


@contextmanager
def open_run(settings: PrecomputeSettings, say: Say = lambda _: None) -> Iterator[PrecomputeRun]:
    """Load everything for a run; :attr:`PrecomputeRun.work` says how much it will be.

    Raises CorpusError, RetrievalError, RagCacheError, ModelNotSupported, StoreError: the corpus, the model or
    the cache folder cannot be used, or the KV would not fit; ValueError: A setting is wrong, or a chunk is
    longer than the model's context.
    """
    model_folder()
    check_writable(settings.folder.path)
    corpus = settings.read_corpus()
    kept = open_store(StoreConfig(host_bytes=0, disk_path=settings.folder.kv, disk_bytes=settings.disk_bytes))
    store = WatchedStore(kept)
    with closing(kept), settings.open_engine(store, corpus, cold="never") as rag:
        job = Job(rag, corpus, store, settings, keep_gone=settings.keep_gone)
        work, _ = job.work(kept.__contains__)
        needed = work.todo_bytes - sum(job.gone.values()) * work.token_bytes
        _check_room(needed, sum(tier.budget - tier.nbytes for tier in kept.stats()), settings.folder)
        yield PrecomputeRun(job, work, settings, say)


class PrecomputeRun:
    """A corpus ready to be encoded.

    Attributes
    ----------
    work : Work
    """

    def __init__(self, job: Job, work: Work, settings: PrecomputeSettings, say: Say) -> None:
        self._job, self._settings, self._say = job, settings, say
        self.work = work

    def run(self, *, progress: bool = False) -> Precomputed:
        """Forget what is gone, encode what is missing, embed what the index of ``ask`` lacks.

        The KV that was stored stays if this is interrupted.

        Raises StoreError: some KV, or the list of what is encoded, could not be written.
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
        corpus, folder = Path(self._settings.corpus), self._settings.folder
        corpus_index(self._job.corpus, corpus, MiniLM(), folder.indexes, self._say)
        work = self.work
        encoded = work.chunks - work.stored  # similar:n stores what chunks stand behind, too
        return Precomputed(encoded, work.stored, work.gone, store.tokens, store.nbytes, seconds)


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
