"""What precompute has to do for one corpus, and the steps of doing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragcachekit.commands.corpus import Corpus
from ragcachekit.commands.own_files import OwnFiles, one_token
from ragcachekit.commands.precompute.manifest import Scope, read_manifests, write_manifest
from ragcachekit.commands.precompute.store import WatchedStore
from ragcachekit.commands.reading_prompt import prompt_for
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.model.tokens import SegmentTokenizer
from ragcachekit.types import KVKey

SAMPLE_TOKENS = 1024
"""Tokens that a dry run encodes to measure the speed."""


@dataclass(frozen=True)
class Work:
    """How much there is to do.

    ``stored`` chunks have their KV already, ``todo_tokens`` are those of the others, ``token_bytes`` is the
    KV of one token over all layers, ``gone`` chunks are to be forgotten, ``seconds`` is the time for the
    others from a small sample (None: not measured), ``notes`` say what was skipped.
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


class Job:
    """An engine, a corpus, the store between them, and what earlier runs are known to have encoded.

    Attributes
    ----------
    gone : dict
        Ids of chunks that are to be forgotten, and their tokens; empty with ``keep_gone``.
    """

    def __init__(
        self, rag: RagCache, corpus: Corpus, store: WatchedStore, settings: OwnFiles, *, keep_gone: bool
    ) -> None:
        self.rag, self.corpus, self.store = rag, corpus, store
        self.system = prompt_for(rag.tokenizer).before
        tokens = SegmentTokenizer(rag.tokenizer)
        self._sizes = [len(tokens.chunk(text)) for text in corpus.texts]
        self._keys = self._all_keys()
        self._present = {key.chunk_id: size for key, size in zip(self._keys, self._sizes, strict=True)}
        self._folder, self._scope = settings.folder.manifests, _scope(settings, rag, self._keys)
        self._known = read_manifests(self._folder, self._scope)
        self.gone = {} if keep_gone else self._known.gone(self._present)

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
            one_token(self.rag.model, describe_rope(self.rag.model)).nbytes,
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


def _scope(settings: OwnFiles, rag: RagCache, keys: Sequence[KVKey]) -> Scope:
    corpus = str(Path(settings.corpus).expanduser().resolve())
    encoder = keys[0].encoding.partition("@")[0]
    return Scope(rag.namespace, corpus, encoder, rag.fingerprint, settings.chunk_tokens)
