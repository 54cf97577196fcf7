"""Encode a corpus ahead of the questions (EPIC's compile step): how much it is, and doing it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ragcachekit.commands.ask import Say, corpus_index
from ragcachekit.commands.checks import check_writable
from ragcachekit.commands.corpus import Corpus
from ragcachekit.commands.embedding import MiniLM, model_folder
from ragcachekit.commands.own_files import OwnFiles, one_token
from ragcachekit.commands.precompute.manifest import Scope, read_manifests, write_manifest
from ragcachekit.commands.reading_prompt import prompt_for
from ragcachekit.commands.workspace import CacheFolder
from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import StoreError
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.model.tokens import SegmentTokenizer
from ragcachekit.store.base import KVStore
from ragcachekit.store.entry.file import entry_name
from ragcachekit.store.factory import open_store
from ragcachekit.store.null import NullStore
from ragcachekit.types import KVKey

SAMPLE_TOKENS = 1024
"""Tokens that a dry run encodes to measure the speed."""


@dataclass(frozen=True)
class PrecomputeSettings(OwnFiles):
    """What ``ragcachekit precompute`` takes; with ``keep_gone`` no KV is forgotten.

    ``policy`` counts for the encoder that it asks for (``lego0``: ``sinks:4``). All else must be as in
    :class:`~ragcachekit.commands.ask.AskSettings` for the KV to be found.
    """

    keep_gone: bool = False


@dataclass(frozen=True)
class Work:
    """How much there is to do.

    ``todo_tokens`` are those of chunks that are not among the ``stored`` ones, ``token_bytes`` is the KV of
    one token over all layers, ``gone`` counts chunks to forget, ``seconds`` is estimated from a small sample
    (None: not measured), ``notes`` name what was skipped.
    """

    files: int
    chunks: int
    tokens: int
    stored: int
    todo_tokens: int
    token_bytes: int
    gone: int
    notes: tuple[str, ...]
    seconds: float | None = None

    @property
    def todo_bytes(self) -> int:
        """Bytes of KV to be stored."""
        return self.todo_tokens * self.token_bytes


def estimate(settings: PrecomputeSettings) -> Work:
    """Measure the work without touching the cache folder (the dry run).

    Raises CorpusError, RagCacheError, ModelNotSupported, ValueError as :func:`open_run`.
    """
    corpus, kv = settings.read_corpus(), settings.folder.kv

    def on_disk(key: KVKey) -> bool:  # opening a store would create its folder
        return (kv / entry_name(key.digest())).is_file()

    with tempfile.TemporaryDirectory(prefix="ragcachekit-") as scratch:
        store = _ListingStore(NullStore())
        with settings.open_engine(store, corpus, cache_dir=Path(scratch), cold="never") as rag:
            run = PrecomputeRun(settings, rag, corpus, store, on_disk)
            return replace(run.work, seconds=run.sampled_seconds()) if run.todo else run.work


@contextmanager
def open_run(settings: PrecomputeSettings, say: Say = lambda _: None) -> Iterator[PrecomputeRun]:
    """Load everything for a run, and check that its KV fits.

    Raises CorpusError, RetrievalError, RagCacheError, ModelNotSupported, StoreError if the corpus, the model
    or the cache folder cannot be used, or the KV does not fit; ValueError for a wrong setting, or a chunk
    longer than the model's context.
    """
    model_folder()
    check_writable(settings.folder.path)
    corpus = settings.read_corpus()
    disk = open_store(StoreConfig(host_bytes=0, disk_path=settings.folder.kv, disk_bytes=settings.disk_bytes))
    store = _ListingStore(disk)
    with closing(disk), settings.open_engine(store, corpus, cold="never") as rag:
        run = PrecomputeRun(settings, rag, corpus, store, disk.__contains__, say)
        needed = run.work.todo_bytes - sum(run.gone.values()) * run.work.token_bytes
        _check_room(needed, sum(tier.budget - tier.nbytes for tier in disk.stats()), settings.folder)
        yield run


class PrecomputeRun:
    """A corpus ready to be encoded.

    ``work`` is how much there is to do, ``todo`` the tokens of each text to encode, ``gone`` the ids of
    chunks to forget, with their tokens.
    """

    def __init__(
        self,
        settings: PrecomputeSettings,
        rag: RagCache,
        corpus: Corpus,
        store: _ListingStore,
        is_stored: Callable[[KVKey], bool],
        say: Say = lambda _: None,
    ) -> None:
        self._settings, self._rag, self._corpus, self._store, self._say = settings, rag, corpus, store, say
        self._system = prompt_for(rag.tokenizer).before
        with store.listing() as self._keys:
            self._encode(corpus.texts)
        count = SegmentTokenizer(rag.tokenizer).chunk
        tokens = [len(count(text)) for text in corpus.texts]
        entries = list(zip(self._keys, corpus.texts, tokens, strict=True))
        self.todo = {text: number for key, text, number in entries if not is_stored(key)}
        self._present = {key.chunk_id: number for key, _, number in entries}
        self._scope = Scope(
            rag.namespace,
            str(Path(settings.corpus).expanduser().resolve()),
            self._keys[0].encoding.partition("@")[0],
            rag.fingerprint,
            settings.chunk_tokens,
        )
        self._manifests = read_manifests(settings.folder.manifests, self._scope)
        self.gone = {} if settings.keep_gone else self._manifests.gone(self._present)
        self.work = Work(
            corpus.files,
            len(tokens),
            sum(tokens),
            len(tokens) - len(self.todo),
            sum(self.todo.values()),
            one_token(rag.model, describe_rope(rag.model)).nbytes,
            len(self.gone),
            (*corpus.notes, *self._manifests.notes),
        )

    def run(self, *, progress: bool = False) -> float:
        """Forget what is gone, encode what is missing, embed what the index of ``ask`` lacks.

        Returned are the seconds that the KV took. What was stored stays if this is interrupted.

        Raises StoreError if some KV, or the list of what is encoded, could not be written.
        """
        begun, folder = time.perf_counter(), self._settings.folder
        if self.gone:
            self._rag.forget(self.gone)
        # Listed before anything is encoded: after an interruption a later run can forget all that is stored.
        earlier = {id: n for id, n in self._manifests.own().items() if id not in self.gone}
        write_manifest(folder.manifests, self._scope, {**earlier, **self._present})
        self._encode(self._corpus.texts, progress)
        if lost := sum(key not in self._store for key in self._keys):
            raise StoreError(
                f"{lost} of {self.work.chunks} chunks could not be stored; free some space "
                "and run the same command again"
            )
        seconds = time.perf_counter() - begun
        corpus_index(self._corpus, Path(self._settings.corpus), MiniLM(), folder.indexes, self._say)
        return seconds

    def sampled_seconds(self) -> float:
        """Time to encode everything, from up to :data:`SAMPLE_TOKENS`."""
        texts = list(self.todo)
        self._encode(texts[:1])  # a model's first forward is slower than the others
        sample, tokens = list[str](), 0
        while len(sample) < len(texts) and tokens < SAMPLE_TOKENS:
            tokens += self.todo[texts[len(sample)]]
            sample.append(texts[len(sample)])
        begun = time.perf_counter()
        self._encode(sample)
        return (time.perf_counter() - begun) / tokens * self.work.todo_tokens

    def _encode(self, texts: list[str], progress: bool = False) -> None:
        self._rag.encode(texts, system=self._system, progress=progress)


class _ListingStore(KVStore):
    """Another store, which claims to hold every key while it lists them."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._keys: list[KVKey] | None = None
        for name in ("get", "open", "put", "discard", "keys", "evict", "forget", "stats", "close"):
            setattr(self, name, getattr(store, name))

    @contextmanager
    def listing(self) -> Iterator[list[KVKey]]:
        """Collect the keys that are looked up; meanwhile nothing is encoded."""
        self._keys = []
        try:
            yield self._keys
        finally:
            self._keys = None

    def __contains__(self, key: KVKey) -> bool:
        if self._keys is None:
            return key in self._store
        self._keys.append(key)
        return True


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
