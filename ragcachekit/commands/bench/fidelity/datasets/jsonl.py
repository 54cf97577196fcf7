"""Own questions, as :func:`~ragcachekit.commands.bench.fidelity.questions.read_questions` reads them."""

from __future__ import annotations

from pathlib import Path

from ragcachekit.commands.bench.fidelity.datasets.base import Passages
from ragcachekit.commands.bench.fidelity.questions import read_questions


def load(path: Path) -> list[Passages]:
    """Every line; all of its chunks count as relevant."""
    return [
        Passages(q.question, q.answers, q.chunks, (), q.document, q.question_type)
        for q in read_questions(path)
    ]
