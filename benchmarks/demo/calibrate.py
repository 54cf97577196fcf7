"""Which questions the demo asks, and the query cache's tolerance, calibrated on others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from benchmarks.demo.chain import Wording
from benchmarks.demo.score import KINDS
from benchmarks.world.world import Question, World, variants
from ragcachekit.query.calibrate import Calibration, calibrate

VARIANTS = 4
MAX_FALSE_HITS = 0.01
"""The bound of the calibration: at most this share of wordings within the tolerance of another question."""


def choose_questions(world: World, number: int, rng: random.Random) -> list[Question]:
    """``number`` questions, as many of each kind as can be, in random order.

    Raises
    ------
    ValueError
        If the world has too few of a kind.
    """
    chosen = []
    for at, kind in enumerate(KINDS):
        pool = [question for question in world.questions if question.kind == kind]
        wanted = number // len(KINDS) + (at < number % len(KINDS))
        if not 1 <= wanted <= len(pool):
            raise ValueError(f"cannot take {wanted} questions of kind {kind} from {len(pool)}")
        chosen += rng.sample(pool, wanted)
    rng.shuffle(chosen)
    return chosen


def workload(questions: Sequence[Question], rng: random.Random) -> list[Wording]:
    """Every question in four wordings, shuffled (Proximity, section 4)."""
    wordings = [Wording(q, text) for q in questions for text in variants(q.text, VARIANTS)]
    rng.shuffle(wordings)
    return wordings


def calibration_questions(
    world: World, taken: Sequence[Question], number: int, rng: random.Random
) -> list[Question]:
    """About ``number`` questions that are not ``taken``, half of them siblings of the other half.

    A sibling asks for the same relation of another subject: what lies nearest to a question and must not
    be taken for it.
    """
    left = [question for question in world.questions if question not in set(taken)]
    first = choose_questions(World(world.articles, tuple(left)), max(len(KINDS), number // 2), rng)
    out = dict.fromkeys(first)
    for question in first:
        same = [q for q in left if q.relation == question.relation and q.articles[0] != question.articles[0]]
        out.update(dict.fromkeys(rng.sample(same, min(1, len(same)))))
    return list(out)


def calibrated(questions: Sequence[Question], embeddings: Embeddings) -> Calibration:
    """The largest tolerance under the bound :data:`MAX_FALSE_HITS`, for the cosine distance.

    Rewordings are two wordings of a question; the others are, for each wording, the nearest wording of
    another question, as a cache that holds all of them would find it.
    """
    one, two = (_embedded(embeddings, questions, which) for which in (0, 1))
    nearest = [_nearest_other(side, (one, two)) for side in (one, two)]
    return calibrate(
        (one, two),
        (np.concatenate([one, two]), np.concatenate(nearest)),
        metric="cosine",
        max_false_hit_rate=MAX_FALSE_HITS,
    )


def _embedded(embeddings: Embeddings, questions: Sequence[Question], which: int) -> NDArray[np.float32]:
    texts = [variants(question.text, VARIANTS)[which] for question in questions]
    return np.asarray(embeddings.embed_documents(texts), np.float32)


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
