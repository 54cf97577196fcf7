"""Question sets for the sweeps: where the evidence stands, and how many chunks of which size there are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.world.questions import (
    ARTICLES,
    KINDS,
    WorldQuestion,
    choose_questions,
    held_out_world,
    shuffled,
    world_question,
)
from benchmarks.world.world import SEPARATOR, Article, Question, World
from ragcachekit.commands.bench.fidelity.rows import Results, Row, quality_rows

NEEDLE = "needle"
CHUNKS = "chunks"
SWEEPS = (NEEDLE, CHUNKS)

_NUMBERS = (1, 2, 3, 4, 5, 6)  # articles: 2 to 12 chunks
_SENTENCE = ". "
_SIZES = ("half a chunk", "chunk", "article", "two articles")


def sweep_questions(name: str, seed: int, per_type: int) -> list[WorldQuestion]:
    """The questions of one sweep, each with the cell it belongs to.

    ``needle``: kinds a and b, the article with the evidence at every place of contexts of 2 to 12
    chunks (``position``: chunks before it); the same questions and other articles in every cell.
    ``chunks``: all kinds (two chunks hold no question of kind c); contexts of 2 to 12 chunks of the
    usual size, and contexts of four articles whose text is the same, token for token, cut into chunks
    of four sizes.

    Raises
    ------
    ValueError
        For an unknown sweep; else as :func:`~benchmarks.world.questions.world_questions`.
    """
    if name not in SWEEPS:
        raise ValueError(f"unknown sweep {name!r}; known: {', '.join(SWEEPS)}")
    rng, world = random.Random(seed), held_out_world(seed)
    questions = choose_questions(world, per_type * len(KINDS), rng)
    if name == NEEDLE:
        return _needle(world, [q for q in questions if q.kind != "c"], rng)
    return [*_numbers(world, questions, rng), *_sizes(world, questions, rng)]


def sweep_rows(name: str, questions: Sequence[WorldQuestion], results: Results, seed: int) -> list[Row]:
    """The quality rows of every cell, policy by policy."""
    out: list[Row] = []
    for cell in sorted({question.cell for question in questions}, key=_order):
        inside = [i for i, question in enumerate(questions) if question.cell == cell]
        chosen = {way: [found[i] for i in inside] for way, found in results.items()}
        for row in quality_rows([questions[i] for i in inside], chosen, seed):
            out.append({"part": name, **dict(cell), **{key: row[key] for key in row if key != "part"}})
    ways = [(way.policy, way.encoder) for way in results]
    return sorted(out, key=lambda row: ways.index((row["policy"], row["encoder"])))


def _order(cell: tuple[tuple[str, Any], ...]) -> tuple[str, int, int]:
    named = dict(cell)
    return named.get("axis", ""), named.get("chunks", 0), named.get("position", 0)


def _needle(world: World, questions: Sequence[Question], rng: random.Random) -> list[WorldQuestion]:
    out = []
    for question in questions:
        (evidence,) = (article for article in world.articles if article.title in question.articles)
        others = rng.sample([a for a in world.articles if a is not evidence], max(_NUMBERS) - 1)
        for count in _NUMBERS:
            for slot in range(count):
                articles = [*others[:slot], evidence, *others[slot : count - 1]]
                cell = (("chunks", 2 * count), ("position", 2 * slot))
                out.append(world_question(question, articles, cell))
    return out


def _numbers(world: World, questions: Sequence[Question], rng: random.Random) -> list[WorldQuestion]:
    out = []
    for question in questions:
        for count in _NUMBERS:
            if count >= len(question.articles):
                cell = (("axis", "number"), ("size", "chunk"), ("chunks", 2 * count))
                out.append(world_question(question, shuffled(world, question, count, rng), cell))
    return out


def _sizes(world: World, questions: Sequence[Question], rng: random.Random) -> list[WorldQuestion]:
    out = []
    for question in questions:
        articles = shuffled(world, question, ARTICLES, rng)
        whole = world_question(question, articles)
        for size in _SIZES:
            pieces = _pieces(articles, size)
            chunks, joints = tuple(text for text, _ in pieces), tuple(joint for _, joint in pieces[:-1])
            cell = (("axis", "size"), ("size", size), ("chunks", len(chunks)))
            out.append(replace(whole, chunks=chunks, joints=joints, cell=cell))
    return out


def _pieces(articles: Sequence[Article], size: str) -> list[tuple[str, str]]:
    """Chunks of a size and what follows each of them; joined they are always the same text."""
    if size == "half a chunk":
        return [piece for article in articles for chunk in article.chunks for piece in _halves(chunk)]
    if size == "chunk":
        return [(chunk, SEPARATOR) for article in articles for chunk in article.chunks]
    together = {"article": 1, "two articles": 2}[size]
    groups = [articles[at : at + together] for at in range(0, len(articles), together)]
    return [(SEPARATOR.join(c for article in group for c in article.chunks), SEPARATOR) for group in groups]


def _halves(chunk: str) -> list[tuple[str, str]]:
    """The two sentences of a chunk."""
    first, found, second = chunk.partition(_SENTENCE)
    if not found:
        return [(chunk, SEPARATOR)]
    return [(first + _SENTENCE.rstrip(), " "), (second, SEPARATOR)]
