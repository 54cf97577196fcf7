"""What the fidelity bench asks: questions about the sample world, or the user's own from a file."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragcachekit.bench.demo_calibrate import choose_questions
from ragcachekit.bench.demo_score import KINDS
from ragcachekit.bench.world import SEPARATOR, TRAINING_SEEDS, Article, Question, World, make_world

ARTICLES = 4  # eight chunks; the reader was trained on two to five articles


@dataclass(frozen=True)
class FidelityQuestion:
    """One question with its retrieved chunks.

    Attributes
    ----------
    question, answer : str
    chunks : tuple of str
        In the order of the prompt.
    question_type : str
        Figures are given per type too; empty for none.
    joints : tuple of str
        What stands between the chunks, one fewer than chunks; empty: a blank line everywhere.
    cell : tuple of (str, value)
        Which cell of a sweep this question belongs to; empty outside sweeps.
    """

    question: str
    chunks: tuple[str, ...]
    answer: str
    question_type: str = ""
    joints: tuple[str, ...] = ()
    cell: tuple[tuple[str, Any], ...] = ()

    @property
    def between(self) -> tuple[str, ...]:
        """What stands between the chunks."""
        return self.joints or (SEPARATOR,) * (len(self.chunks) - 1)


def digest(questions: Sequence[FidelityQuestion]) -> str:
    """SHA-256 over all that is asked, in order."""
    text = json.dumps([asdict(question) for question in questions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def world_questions(seed: int, per_type: int) -> list[FidelityQuestion]:
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
) -> FidelityQuestion:
    """A question over whole articles, in this order."""
    chunks = tuple(chunk for article in articles for chunk in article.chunks)
    return FidelityQuestion(question.text, chunks, question.answer, question.kind, cell=tuple(cell))


def read_questions(path: str | os.PathLike[str]) -> list[FidelityQuestion]:
    """Questions of a JSONL file: ``{"question", "chunks", "answer"}`` per line, ``"type"`` if wanted.

    Raises
    ------
    ValueError
        For a line that is not of this form (with its number), or a file without questions.
    OSError
    """
    out = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    out.append(_parsed(line))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
    if not out:
        raise ValueError(f'{path} has no questions; give {{"question", "chunks", "answer"}} per line')
    return out


def _parsed(line: str) -> FidelityQuestion:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(found, dict):
        raise TypeError(f'give an object {{"question", "chunks", "answer"}}, not a {type(found).__name__}')
    if missing := [name for name in ("question", "chunks", "answer") if name not in found]:
        raise ValueError(f"{', '.join(map(repr, missing))} missing")
    chunks, kind = found["chunks"], found.get("type", "")
    if not isinstance(chunks, list) or not chunks:
        raise TypeError("'chunks' must be a list of texts, at least one")
    texts = {"question": found["question"], "answer": found["answer"]}
    texts |= {f"chunk {number}": chunk for number, chunk in enumerate(chunks, 1)}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"{name} must be a text that is not empty")
    if not isinstance(kind, str) or kind == "all":
        raise TypeError("'type' must be a text other than 'all'")
    return FidelityQuestion(found["question"], tuple(chunks), found["answer"], kind)
