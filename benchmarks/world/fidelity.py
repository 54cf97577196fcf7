"""The fidelity bench over the sample world, answered by the reader."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from benchmarks.world.layers import layer_rows
from benchmarks.world.questions import WorldQuestion, held_out_world, world_questions
from benchmarks.world.reader_folder import ANSWER_TOKENS, READER, READER_NAME, one_thread
from benchmarks.world.sweeps import sweep_questions, sweep_rows
from ragcachekit.commands.bench.fidelity import run as shipped
from ragcachekit.commands.bench.fidelity.run import FidelitySettings
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.own_questions import DOCUMENT, Sample, neighbours_of
from ragcachekit.plan.neighbours import Neighbours, PrecedingChunks

_PER_TYPE, _PER_TYPE_SWEEP = 100, 20
_POLICIES = (
    *("reuse", "lego0", *(f"lego:{k}" for k in (1, 2, 4, 6, 12))),
    *(
        f"{kind}:{r}"
        for kind in ("random", "heavy", "query", "deep", "impact")
        for r in (0.05, 0.1, 0.15, 0.3)
    ),
    *("cacheblend:0.05", "cacheblend:0.15", "cacheblend-gradual:0.15"),
    *(f"craft:{alpha}" for alpha in (0.1, 0.2, 0.3, 0.6)),  # over standalone half of it is spent
    "craft-focused:0.6",
)


@dataclass(frozen=True)
class WorldFidelitySettings(FidelitySettings):
    """What is measured.

    Attributes
    ----------
    per_type : int, optional
        Questions of each kind; default 100, in a sweep 20.
    sweep : {"needle", "chunks"}, optional
    """

    model: str = READER
    max_new_tokens: int = ANSWER_TOKENS
    per_type: int | None = None
    sweep: str | None = None


def run(
    settings: WorldFidelitySettings | None = None,
    *,
    work: str | os.PathLike[str] | None = None,
    neighbours: Neighbours | None = None,
    progress: bool = False,
) -> BenchReport:
    """As :func:`ragcachekit.commands.bench.fidelity.run.run`; with rows by layer, or by cell of a sweep."""
    chosen = settings or WorldFidelitySettings()
    chosen = replace(chosen, policies=chosen.policies or _POLICIES)  # the reader's prompts cost little
    chosen.check()
    questions = _questions(chosen)

    def near() -> Neighbours:
        if neighbours is not None:
            return neighbours
        if chosen.neighbours == DOCUMENT:
            return PrecedingChunks(article.chunks for article in held_out_world(chosen.seed).articles)
        return neighbours_of(Sample(tuple(questions)), False, progress)

    with one_thread():
        results = shipped.ask(chosen, questions, near, work=work, progress=progress)
    report = shipped.report(chosen, questions, results)
    *quality, check = report.rows
    if chosen.sweep is not None:
        rows = sweep_rows(chosen.sweep, questions, results, chosen.seed)
    else:
        rows = [*quality, *layer_rows(results, chosen.seed)]
    report = replace(report, rows=(*rows, check))
    return replace(report, model=READER_NAME) if chosen.model == READER else report


def _questions(settings: WorldFidelitySettings) -> list[WorldQuestion]:
    if settings.sweep is not None:
        return sweep_questions(settings.sweep, settings.seed, settings.per_type or _PER_TYPE_SWEEP)
    return world_questions(settings.seed, settings.per_type or _PER_TYPE)
