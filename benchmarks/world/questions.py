"""Questions about the sample world, each with retrieved articles, for the fidelity and budget benches."""

from __future__ import annotations

import random

from benchmarks.world.world import TRAINING_SEEDS, Article, Question, World, make_world
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion

KINDS = ("a", "b", "c")
ARTICLES = 4  # eight chunks; the reader was trained on two to five articles


def world_questions(seed: int, per_type: int) -> list[FidelityQuestion]:
    """``per_type`` questions of each kind about a world that the reader was not trained on.

    Each prompt holds the articles that are needed and random others, four in all, in random order. Raises
    ValueError for a seed that training used, or more questions than the world has.
    """
    rng = random.Random(seed)
    world = held_out_world(seed)
    out = []
    for question in choose_questions(world, per_type * len(KINDS), rng):
        articles = shuffled(world, question, ARTICLES, rng)
        chunks = tuple(chunk for article in articles for chunk in article.chunks)
        out.append(FidelityQuestion(question.text, chunks, question.answer, question.kind))
    return out


def choose_questions(world: World, number: int, rng: random.Random) -> list[Question]:
    """``number`` questions, evenly of each kind, in random order; ValueError if there are too few."""
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
