"""The contract of datasets: questions with their passages, from a file in a published format."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ORDERS = ("shuffled", "given")
HALVES = ("all", "develop", "report")


@dataclass(frozen=True)
class Passages:
    """One question as its file has it.

    ``relevant`` are the passages that the answer needs, ``others`` further ones, both in the order of the
    file; ``answers`` are equally right. ``document`` are the chunks of the document that they come from, in
    order, if the file has it; ``kind`` groups figures.
    """

    question: str
    answers: tuple[str, ...]
    relevant: tuple[str, ...]
    others: tuple[str, ...] = ()
    document: tuple[str, ...] = ()
    kind: str = ""


Loader = Callable[[Path], list[Passages]]
"""Reads a whole file; raises ValueError where it has another format."""


@dataclass(frozen=True)
class Sampling:
    """Which questions of a dataset are asked, and with which passages.

    ``distractors`` passages are added to the relevant ones (None: all of them). The ``half`` to ``develop``
    on and that to ``report`` are told apart by a digest of the question, whatever the seed.
    """

    count: int = 50
    distractors: int | None = 3
    order: str = "shuffled"
    half: str = "all"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1 or (self.distractors is not None and self.distractors < 0):
            raise ValueError("give at least one question, and no fewer than 0 distractors")
        if self.order not in ORDERS:
            raise ValueError(f"unknown order {self.order!r}; known: {', '.join(ORDERS)}")
        if self.half not in HALVES:
            raise ValueError(f"unknown half {self.half!r}; known: {', '.join(HALVES)}")

    def draw(self, questions: Sequence[Passages]) -> list[Passages]:
        """At most ``count`` questions of the half, in random order; ValueError if there is none."""
        kept = [one for one in questions if self.half in ("all", half_of(one.question))]
        random.Random(self.seed).shuffle(kept)
        if not kept:
            raise ValueError(f"the file has no questions in the half {self.half!r}")
        return kept[: self.count]

    def chunks(self, one: Passages) -> tuple[str, ...]:
        """The passages of one prompt, in order, each once."""
        rng = random.Random(f"{self.seed} {one.question}")
        others = [text for text in dict.fromkeys(one.others) if text not in one.relevant]
        few = others if self.distractors is None else rng.sample(others, min(self.distractors, len(others)))
        chosen = {*one.relevant, *few}
        source = (one.document or (*one.relevant, *one.others)) if few else one.relevant
        out = [text for text in dict.fromkeys(source) if text in chosen]
        if self.order == "shuffled":
            rng.shuffle(out)
        return tuple(out)


def half_of(question: str) -> str:
    """``develop`` or ``report``, by the first bit of SHA-256."""
    return HALVES[1 + (hashlib.sha256(question.encode()).digest()[0] >> 7)]


def read_items(path: str | os.PathLike[str]) -> list[Any]:
    """The items of a JSON list, or of a file with one JSON value per line; ValueError for other text."""
    text = Path(path).read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines() if line.strip()]
