"""Thirty questions about the standard library, written by hand, with the sentences that answer them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Question:
    """A question in several wordings.

    ``answer`` stands in ``sentence``, and that in the documentation of ``module``, if blanks and line ends
    count as the same.
    """

    module: str
    sentence: str
    answer: str
    wordings: tuple[str, ...]

    @property
    def text(self) -> str:
        """The first wording."""
        return self.wordings[0]

    def evidence(self, texts: Sequence[str]) -> frozenset[int]:
        """Places of the chunks that hold the sentence; none if this Python's documentation lacks it."""
        wanted = _one_line(self.sentence)
        return frozenset(place for place, text in enumerate(texts) if wanted in _one_line(text))


def questions() -> tuple[Question, ...]:
    """All questions, in the order of the file."""
    lines = (_FOLDER / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Question(**{**line, "wordings": tuple(line["wordings"])}) for line in map(json.loads, lines))


def calibration_questions() -> tuple[tuple[str, str], ...]:
    """Other questions in two wordings each; every one has a sibling that differs in a word or two."""
    lines = (_FOLDER / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple((one, two) for one, two in map(json.loads, lines))


def workload(asked: Sequence[Question], seed: int) -> list[tuple[int, str]]:
    """Every wording of every question with its question's place, shuffled."""
    out = [(place, text) for place, question in enumerate(asked) for text in question.wordings]
    random.Random(seed).shuffle(out)
    return out


def _one_line(text: str) -> str:
    return " ".join(text.split())
