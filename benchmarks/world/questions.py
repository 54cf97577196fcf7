"""Questions about the sample world, each with retrieved articles, for the fidelity and budget benches."""

from __future__ import annotations

import random

from benchmarks.world.world import TRAINING_SEEDS, World, make_world
from ragcachekit.commands.questions import Question, Sample
from ragcachekit.plan.companions import PrecedingChunks

KINDS = ("a", "b", "c")
ARTICLES = 4  # eight chunks; the reader was trained on two to five articles


def world_sample(seed: int, per_type: int) -> Sample:
    """Questions as :func:`world_questions`, and the articles as their documents."""
    articles = tuple(article.chunks for article in held_out_world(seed).articles)
    return Sample(tuple(world_questions(seed, per_type)), neighbours=PrecedingChunks(articles))


def world_questions(seed: int, per_type: int) -> list[Question]:
    """``per_type`` questions of each kind about a world that the reader was not trained on.

    Each prompt holds the articles that are needed and random others, four in all, in random order.

    Raises
    ------
    ValueError
        For a seed that training used, or more questions than the world has.
    """
    rng, world, chosen = random.Random(seed), held_out_world(seed), []
    for kind in KINDS:
        pool = [question for question in world.questions if question.kind == kind]
        if not 1 <= per_type <= len(pool):
            raise ValueError(f"cannot take {per_type} questions of kind {kind} from {len(pool)}")
        chosen += rng.sample(pool, per_type)
    rng.shuffle(chosen)
    out = []
    for question in chosen:
        needed = [article for article in world.articles if article.title in question.articles]
        others = [article for article in world.articles if article.title not in question.articles]
        articles = needed + rng.sample(others, ARTICLES - len(needed))
        rng.shuffle(articles)
        chunks = tuple(chunk for article in articles for chunk in article.chunks)
        out.append(Question(question.text, chunks, (question.answer,), question.kind))
    return out


def held_out_world(seed: int) -> World:
    """The world of a seed that training did not use."""
    if not 0 <= seed < TRAINING_SEEDS:
        raise ValueError(f"the seed must be from 0 to {TRAINING_SEEDS - 1}: the reader was trained above")
    return make_world(seed)
