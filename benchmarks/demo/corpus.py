"""What the demo searches and asks: chunks of documentation, an index, handwritten questions, a tolerance."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from ragcachekit.model.loading import SAMPLE
from ragcachekit.retrieval.distances import Calibration, calibrate
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
        """As LangChain asks for it; the second time it takes no time."""
        if text not in self._known:
            self._known[text] = self._embeddings.embed_query(text)
        return self._known[text]


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


@dataclass(frozen=True)
class Question:
    """A question in several wordings.

    ``answer`` is in ``sentence``, and that in the documentation of ``module``, if blanks and line ends
    count as the same.
    """

    module: str
    sentence: str
    answer: str
    wordings: tuple[str, ...]

    @property
    def text(self) -> str:
        """The first wording."""
        return self.wordings[0]

    def evidence(self, texts: Sequence[str]) -> frozenset[int]:
        """Places of the chunks that hold the sentence; none if this Python's documentation lacks it."""
        wanted = _one_line(self.sentence)
        return frozenset(place for place, text in enumerate(texts) if wanted in _one_line(text))


def questions() -> tuple[Question, ...]:
    """All questions, in the order of the file."""
    lines = (Path(__file__).parent / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Question(**{**line, "wordings": tuple(line["wordings"])}) for line in map(json.loads, lines))


def calibration_questions() -> tuple[tuple[str, str], ...]:
    """Other questions in two wordings each; every one has a sibling that differs in a word or two."""
    lines = (Path(__file__).parent / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple((one, two) for one, two in map(json.loads, lines))


def _one_line(text: str) -> str:
    return " ".join(text.split())


MAX_FALSE_HITS = 0.1
"""Share of wordings whose nearest other question may lie within the tolerance; all have a close sibling."""


@dataclass(frozen=True)
class Settings:
    """What is asked of what.

    ``questions`` are asked, ``timed`` of them timed. ``chunks``, of at most ``wordpieces`` each, are the
    first ones of all modules, or of those in ``modules`` (None: all chunks). ``vectors`` is the size of the
    index with its random fillers. ``k`` chunks go into a prompt, ``max_tokens`` into an answer.
    """

    questions: int = 30
    timed: int = 8
    chunks: int | None = 600
    wordpieces: int = 160
    vectors: int = 200_000
    k: int = 4
    max_tokens: int = 16
    modules: tuple[str, ...] = ()
    model: str = SAMPLE
    seed: int = 0


@dataclass(frozen=True)
class Corpus:
    """Chunks and their search; the questions that they answer, and the places of the answers.

    ``wordings`` are those of all questions, shuffled, each with its question's place; their embeddings are
    known, and took ``embed_ms`` each. ``missing`` are questions that these chunks do not answer.
    """

    texts: tuple[str, ...]
    embeddings: RememberedEmbeddings
    retriever: ManualRetriever
    asked: tuple[Question, ...]
    evidence: tuple[frozenset[int], ...]
    missing: tuple[Question, ...]
    wordings: tuple[tuple[int, str], ...]
    embed_ms: float
    calibration: Calibration


def read(settings: Settings, progress: bool) -> Corpus:
    """Render, cut and embed the documentation, and choose questions."""
    embedder = MiniLM()

    def count(text: str) -> int:
        return len(embedder.tokenizer(text, truncation=False, verbose=False).input_ids)

    texts = manual.chunks(count, limit=settings.chunks, size=settings.wordpieces, names=settings.modules)
    rows = embedder.embed(texts, progress=progress)
    known = RememberedEmbeddings(embedder)
    found = {
        one: one.evidence(texts)
        for one in questions()
        if not settings.modules or one.module in settings.modules
    }
    asked = tuple(one for one, places in found.items() if places)[: settings.questions]
    wordings = [(place, text) for place, question in enumerate(asked) for text in question.wordings]
    random.Random(settings.seed).shuffle(wordings)
    start = time.perf_counter()
    for _, text in tqdm(wordings, desc="embedding questions", unit="text", disable=not progress):
        known.embed_query(text)
    embed_ms = (time.perf_counter() - start) * 1e3 / max(1, len(wordings))
    index = manual_index(rows, settings.vectors, settings.seed)
    return Corpus(
        texts=texts,
        embeddings=known,
        retriever=ManualRetriever(embeddings=known, index=index, texts=texts, k=settings.k),
        asked=asked,
        evidence=tuple(found[one] for one in asked),
        missing=tuple(one for one, places in found.items() if not places),
        wordings=tuple(wordings),
        embed_ms=embed_ms,
        calibration=calibrated(calibration_questions(), embedder),
    )


def calibrated(pairs: Sequence[tuple[str, str]], embeddings: Embeddings) -> Calibration:
    """The largest tolerance under the bound :data:`MAX_FALSE_HITS`, for the cosine distance.

    ``pairs`` are two wordings of a question each. The different pairs are, for each wording, the nearest
    wording of another question, as a cache that holds all of them would find it.
    """
    sides = [np.asarray(embeddings.embed_documents([*side]), np.float32) for side in zip(*pairs, strict=True)]
    everything = np.concatenate(sides)
    unit = everything / np.linalg.norm(everything, axis=1, keepdims=True)
    near, places = unit @ unit.T, np.tile(np.arange(len(pairs)), 2)
    near[places[:, None] == places] = -np.inf  # wordings of the same question
    nearest = everything[near.argmax(axis=1)]
    one, two = sides
    return calibrate((one, two), (everything, nearest), metric="cosine", max_false_hit_rate=MAX_FALSE_HITS)
