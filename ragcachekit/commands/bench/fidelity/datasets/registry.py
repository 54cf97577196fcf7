"""The registry of datasets: adding a format is one file and one line here."""

from __future__ import annotations

from pathlib import Path

from ragcachekit.commands.bench.fidelity.datasets import jsonl, longbench, musique, squad
from ragcachekit.commands.bench.fidelity.datasets.base import Loader, Passages, Sampling
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion

LOADERS: dict[str, Loader] = {
    "jsonl": jsonl.load,
    "longbench": longbench.load,
    "musique": musique.load,
    "squad": squad.load,
}


def load_dataset(spec: str) -> list[Passages]:
    """The questions of ``format:FILE``, such as ``squad:dev-v2.0.json``.

    Raises ValueError for an unknown format, or a file of another one; OSError if it cannot be read.
    """
    kind, colon, file = spec.partition(":")
    if not (colon and file and kind in LOADERS):
        raise ValueError(f"unknown dataset {spec!r}; give {', '.join(f'{name}:FILE' for name in LOADERS)}")
    try:
        questions = LOADERS[kind](Path(file).expanduser())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is not in the format of {kind} ({what})") from error
    if not questions:
        raise ValueError(f"{file} has no question with an answer")
    return questions


def draw_questions(spec: str, sampling: Sampling) -> tuple[FidelityQuestion, ...]:
    """Questions of ``format:FILE`` with the passages of their prompts; errors as :func:`load_dataset`."""
    return tuple(
        FidelityQuestion(
            one.question,
            sampling.chunks(one),
            one.answers[0],
            one.kind,
            accepted=one.answers[1:],
            document=one.document,
        )
        for one in sampling.draw(load_dataset(spec))
    )
