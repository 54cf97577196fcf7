"""What the query-cache bench asks: a dataset's questions in several wordings."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.datasets import Sampling, load_dataset
from ragcachekit.commands.embedding import MiniLM

PREFIXES = (
    *("Please tell me:", "Quick question:", "I would like to know:", "One more question:", "I wonder:"),
    *("Can you say:", "For my notes:", "Hello,", "Just curious:", "Help me with this:"),
)
_COPY_NOISE = 1.15
"""Norm of what is added to a unit vector: a copy lies at a cosine distance of 0.34 from it.

So far is a passage of SQuAD from its nearest other one (median).
"""


@dataclass(frozen=True, eq=False)
class Workload:
    """Questions in the order they are asked, and what is searched.

    ``questions`` and ``chunks`` are embeddings ``[n, dim]``; ``texts`` are the questions' and ``distinct``
    tells equal questions in different wordings by one number. ``evidence`` are the chunks with the answer to
    each.
    """

    name: str
    texts: tuple[str, ...]
    questions: NDArray[np.float32]
    chunks: NDArray[np.float32]
    distinct: tuple[int, ...]
    evidence: tuple[frozenset[int], ...]


def variants(question: str, n: int = 4) -> tuple[str, ...]:
    """A question with ``n`` different short prefixes (Proximity, section 4.2); which ones depends on it."""
    if not 1 <= n <= len(PREFIXES):
        raise ValueError(f"wordings must be between 1 and {len(PREFIXES)}, got {n}")
    start = zlib.crc32(question.encode())
    return tuple(f"{PREFIXES[(start + i) % len(PREFIXES)]} {question}" for i in range(n))


def of_dataset(
    spec: str, count: int, *, wordings: int = 4, vectors: int = 0, seed: int = 0, progress: bool = False
) -> Workload:
    """A dataset's questions, each with ``wordings`` short prefixes, shuffled (Proximity, section 4.2).

    The index holds all passages of the file. Copies of their embeddings, with noise, fill it up to
    ``vectors``, so that a search costs what it costs in a large index. Errors as of
    :func:`~benchmarks.datasets.load_dataset`.
    """
    passages = load_dataset(spec)
    places: dict[str, int] = {}
    for one in passages:
        for text in (*one.relevant, *one.others):
            places.setdefault(text, len(places))
    chosen = Sampling(count, seed=seed).draw(passages)
    asked = [(n, text) for n, one in enumerate(chosen) for text in variants(one.question, wordings)]
    random.Random(seed).shuffle(asked)
    embedder, texts = MiniLM(), [text for _, text in asked]
    chunks = embedder.embed(list(places), progress=progress)
    evidence = [frozenset(places[text] for text in one.relevant) for one in chosen]
    return Workload(
        f"{spec.rpartition('/')[2]}, {len(chosen)} questions x {wordings} prefixes, {len(places)} passages"
        f"{f' and noisy copies ({vectors} vectors)' if vectors > len(places) else ''}; all-MiniLM-L6-v2",
        tuple(texts),
        embedder.embed(texts, progress=progress),
        with_copies(chunks, vectors, seed),
        tuple(number for number, _ in asked),
        tuple(evidence[number] for number, _ in asked),
    )


def with_copies(rows: NDArray[np.float32], count: int, seed: int) -> NDArray[np.float32]:
    """Unit rows ``[n, dim]`` and copies of them with noise, ``count`` in all."""
    rng, missing = np.random.default_rng(seed), max(count - len(rows), 0)
    copies = rows[rng.integers(0, len(rows), missing)].copy()
    for start in range(0, missing, 16_384):  # a second array of this size would not fit everywhere
        block = slice(start, start + 16_384)
        noise = rng.standard_normal(copies[block].shape, dtype=np.float32)
        copies[block] += _COPY_NOISE * noise / np.sqrt(np.float32(rows.shape[1]))
        copies[block] /= np.linalg.norm(copies[block], axis=1, keepdims=True)
    return np.concatenate([rows, copies])
