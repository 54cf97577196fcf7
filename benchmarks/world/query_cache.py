"""The query-cache bench over the sample world: each question in four wordings, shuffled."""

from __future__ import annotations

import random

from benchmarks.world.world import make_world, variants
from ragcachekit.commands.bench.query_cache import Workload, measure
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.embedding import MiniLM

NAME = "sample world, each question with four prefixes, shuffled; all-MiniLM-L6-v2"


def run(*, lookups: int = 2000, questions: int = 200, seed: int = 0, progress: bool = False) -> BenchReport:
    """As :func:`ragcachekit.commands.bench.query_cache.measure`; 0 questions leave the sweep out."""
    found = workload(questions, seed, progress) if questions else None
    return measure(found, lookups=lookups, seed=seed)


def workload(questions: int, seed: int, progress: bool = False) -> Workload:
    """So many questions of a world, embedded.

    Raises
    ------
    ValueError
        If the world has not so many.
    """
    world, rng = make_world(seed), random.Random(seed)
    if not 0 < questions <= len(world.questions):
        raise ValueError(f"questions must be between 0 and {len(world.questions)}, got {questions}")
    chosen = rng.sample(world.questions, questions)
    asked = [text for question in chosen for text in variants(question.text)]
    rng.shuffle(asked)
    embedder = MiniLM()
    chunks = [chunk for article in world.articles for chunk in article.chunks]
    chunk_rows = embedder.embed(chunks, progress=progress)
    return Workload(NAME, embedder.embed(asked, progress=progress), chunk_rows, questions)
