"""What the demo searches and asks: chunks of documentation, an index, questions, a calibrated tolerance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from benchmarks.demo.manual_search import (
    ManualRetriever,
    RememberedEmbeddings,
    cached_embeddings,
    manual_index,
    manual_texts,
)
from benchmarks.demo.questions import Question, calibration_questions, questions, workload
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.commands.sample_model import SAMPLE
from ragcachekit.retrieval.calibrate import Calibration, calibrate

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


QUICK = Settings(questions=3, timed=1, chunks=40, vectors=2000, modules=("heapq", "textwrap", "tempfile"))


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


def read(settings: Settings, cache: Path, progress: bool) -> Corpus:
    """Render, cut and embed the documentation, and choose questions; embeddings are kept in ``cache``."""
    embedder = MiniLM()
    texts = manual_texts(embedder.tokenizer, settings.chunks, settings.wordpieces, settings.modules)
    rows = cached_embeddings(embedder, texts, cache, progress)
    known = RememberedEmbeddings(embedder)
    found = {
        one: one.evidence(texts)
        for one in questions()
        if not settings.modules or one.module in settings.modules
    }
    asked = tuple(one for one, places in found.items() if places)[: settings.questions]
    wordings = workload(asked, settings.seed)
    begun = time.perf_counter()
    known.remember([text for _, text in wordings], progress)
    embed_ms = (time.perf_counter() - begun) * 1e3 / max(1, len(wordings))
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
    one, two = (
        np.asarray(embeddings.embed_documents([*side]), np.float32) for side in zip(*pairs, strict=True)
    )
    nearest = [_nearest_other(side, (one, two)) for side in (one, two)]
    return calibrate(
        (one, two),
        (np.concatenate([one, two]), np.concatenate(nearest)),
        metric="cosine",
        max_false_hit_rate=MAX_FALSE_HITS,
    )


def _nearest_other(rows: NDArray[np.float32], wordings: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """For row i the nearest of all wordings of questions other than i."""
    everything = np.concatenate(wordings)
    near = _unit(rows) @ _unit(everything).T
    own = np.tile(np.arange(len(rows)), len(wordings))
    near[own[None] == np.arange(len(rows))[:, None]] = -np.inf
    found: NDArray[np.float32] = everything[near.argmax(axis=1)]
    return found


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    unit: NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit
