"""Questions about the sample world, each with retrieved articles, for the fidelity and budget benches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.world.world import TRAINING_SEEDS, Article, Question, World, make_world
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion

KINDS = ("a", "b", "c")
ARTICLES = 4  # eight chunks; the reader was trained on two to five articles


@dataclass(frozen=True)
class WorldQuestion(FidelityQuestion):
    """A question about the sample world; ``cell`` is its cell of a sweep, as (name, value) pairs."""

    cell: tuple[tuple[str, Any], ...] = ()


def world_questions(seed: int, per_type: int) -> list[WorldQuestion]:
    """``per_type`` questions of each kind about a world that the reader was not trained on.

    Each prompt holds the articles that are needed and random others, four in all, in random order.

    Raises
    ------
    ValueError
        For a seed that training used, or more questions than the world has.
    """
    rng = random.Random(seed)
    world = held_out_world(seed)
    questions = choose_questions(world, per_type * len(KINDS), rng)
    return [world_question(q, shuffled(world, q, ARTICLES, rng)) for q in questions]


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


def held_out_world(seed: int) -> World:
    """The world of a seed that training did not use."""
    if not 0 <= seed < TRAINING_SEEDS:
        raise ValueError(f"the seed must be from 0 to {TRAINING_SEEDS - 1}: the reader was trained above")
    return make_world(seed)


def shuffled(world: World, question: Question, articles: int, rng: random.Random) -> list[Article]:
    """The articles that the question needs among random others, in random order."""
    needed = [article for article in world.articles if article.title in question.articles]
    others = [article for article in world.articles if article.title not in question.articles]
    picked = needed + rng.sample(others, articles - len(needed))
    rng.shuffle(picked)
    return picked


def world_question(
    question: Question, articles: Sequence[Article], cell: Sequence[tuple[str, Any]] = ()
) -> WorldQuestion:
    """A question over whole articles, in this order."""
    chunks = tuple(chunk for article in articles for chunk in article.chunks)
    return WorldQuestion(question.text, chunks, question.answer, question.kind, cell=tuple(cell))
