"""A user's own questions: for a model, from a file or a corpus; for the query-cache bench, from a log."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ragcachekit.commands.bench.fidelity.datasets.base import Sampling
from ragcachekit.commands.bench.fidelity.datasets.registry import draw_questions
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion, read_questions
from ragcachekit.commands.calibrate.probes import probes
from ragcachekit.commands.corpus import DEFAULT_CHUNK_TOKENS, Corpus, documents, read_corpus
from ragcachekit.commands.workspace import CacheFolder, load_tokenizer
from ragcachekit.plan.neighbours import Neighbours, PrecedingChunks, SimilarChunks

QUESTIONS, PROBES = "questions", "probes"
EMBEDDING, DOCUMENT = "embedding", "document"


@dataclass(frozen=True)
class Sample:
    """Questions, of one ``kind`` (a user's, or probes made from a corpus), and the corpus if there is one.

    ``documents`` are the chunks of each document, in order, where that is known.
    """

    questions: tuple[FidelityQuestion, ...]
    kind: str = QUESTIONS
    corpus: Corpus | None = None

    @property
    def documents(self) -> tuple[Sequence[str], ...]:
        """Of the corpus, else of the questions themselves."""
        if self.corpus is not None:
            return tuple(documents(self.corpus.chunks))
        return tuple(dict.fromkeys(one.document for one in self.questions if one.document))


@dataclass(frozen=True)
class Asking:
    """Settings of commands that ask a user's model.

    Questions are from a ``dataset`` (``squad:FILE``, ...; as ``sampling`` draws them) or from the JSONL file
    ``questions``, or else ``probes`` of them are made from ``corpus``, cut into chunks of at most
    ``chunk_tokens``. ``policies`` are compared (empty: the default ones); the rest is
    as for :class:`~ragcachekit.engine.rag_cache.RagCache`.
    """

    model: str
    questions: str | os.PathLike[str] | None = None
    corpus: str | os.PathLike[str] | None = None
    dataset: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    policies: tuple[str, ...] = ()
    probes: int = 200
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    seed: int = 0
    max_new_tokens: int = 64
    device: str | None = None
    dtype: str = "auto"
    cache_dir: str | os.PathLike[str] | None = None

    @property
    def folder(self) -> Path:
        """The cache folder."""
        return CacheFolder.at(self.cache_dir).path

    def sample(self, *, answered: bool = True) -> Sample:
        """Read the questions (``answered``: each with a right answer), or make probes.

        Raises ValueError or CorpusError without either.
        """
        if self.dataset is not None:
            return Sample(draw_questions(self.dataset, self.sampling))
        if self.questions is None and self.corpus is None:
            raise ValueError("give --questions (JSONL), or --corpus to make probes from")
        corpus = None
        if self.corpus is not None:
            tokenizer = load_tokenizer(self.model)
            corpus = read_corpus(self.corpus, chunk_tokens=self.chunk_tokens, tokenizer=tokenizer)
        if self.questions is not None:
            return Sample(tuple(read_questions(self.questions, answered=answered)), QUESTIONS, corpus)
        assert corpus is not None
        return Sample(tuple(probes(corpus.chunks, self.probes, self.seed)), PROBES, corpus)


def check_neighbours(name: str, sample: Sample | None = None) -> None:
    """ValueError for an unknown source of neighbours, or for ``document`` if ``sample`` has no documents."""
    if name not in (EMBEDDING, DOCUMENT):
        raise ValueError(f"unknown neighbours {name!r}; known: {EMBEDDING}, {DOCUMENT}")
    if name == DOCUMENT and sample is not None and not sample.documents:
        raise ValueError(
            "nothing says what stands before a chunk: give --corpus, a --dataset with documents (squad), "
            'or questions with their "document"; or use embedding'
        )


def neighbours_of(sample: Sample, preceding: bool, progress: bool) -> Neighbours:
    """Neighbours for ``similar:n``: the chunks before in their document, or the nearest by MiniLM."""
    if preceding and sample.documents:
        return PrecedingChunks(sample.documents)
    from ragcachekit.commands.embedding import MiniLM  # an extra, and needed here only

    asked = (chunk for question in sample.questions for chunk in question.chunks)
    texts = list(dict.fromkeys([*(sample.corpus.texts if sample.corpus is not None else ()), *asked]))
    return SimilarChunks(texts, MiniLM().embed(texts, progress=progress))
