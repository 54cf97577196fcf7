"""Does a quality budget hold? Calibrated on some questions about the sample world, measured on others."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.world.questions import KINDS, held_out_world, world_questions
from benchmarks.world.reader_folder import ANSWER_TOKENS, READER, READER_NAME, one_thread
from ragcachekit.commands.bench.fidelity.engines import FULL, needs_neighbours
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.bench.resample import Bootstrap
from ragcachekit.commands.calibrate.measure import Panel, Scores
from ragcachekit.commands.calibrate.run import CalibrateSettings, calibrated
from ragcachekit.commands.own_questions import Sample
from ragcachekit.encode.neighbours import Neighbours, PrecedingChunks
from ragcachekit.model.pretrained import load_model
from ragcachekit.policies.budgets.budget import Budget
from ragcachekit.policies.budgets.calibration import Calibration, write_record


@dataclass(frozen=True)
class CheckSettings:
    """What is calibrated and measured.

    Attributes
    ----------
    budgets : tuple of float
    encoders : tuple of str
        ``similar:n`` gets the chunks before in the article as neighbours.
    policies : tuple of str
        Candidates; default: those of this version.
    calibrate_on, measure_on : int
        Questions; no question is in both.
    seed : int
        Of the sample world and the bootstrap.
    """

    budgets: tuple[float, ...] = (0.01, 0.02, 0.05)
    encoders: tuple[str, ...] = ("standalone", "similar:1")
    policies: tuple[str, ...] = ()
    calibrate_on: int = 200
    measure_on: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.budgets or not self.encoders:
            raise ValueError("give at least one budget and one encoder")
        for budget in self.budgets:
            Budget(budget)


def run(settings: CheckSettings | None = None, *, progress: bool = False) -> BenchReport:
    """Calibrate every encoder, then answer other questions under ``policy="budget:x"`` and under full.

    Returns
    -------
    BenchReport
        One row per encoder and budget: ``chosen``; ``loss_calibrated`` with its bound ``upper`` on the
        first questions; ``loss`` with ``low`` and ``high`` (95 %, bootstrap, paired) on the others;
        ``held``: whether that loss is within the budget. And the curve, ``part`` = ``curve``.

    Raises
    ------
    ValueError
        For bad budgets, encoders or policies, or more questions than the world has.
    """
    chosen = settings or CheckSettings()
    per_type = -(-(chosen.calibrate_on + chosen.measure_on) // len(KINDS))
    questions = world_questions(chosen.seed, per_type)  # in random order
    first = questions[: chosen.calibrate_on]
    others = questions[chosen.calibrate_on : chosen.calibrate_on + chosen.measure_on]
    near = PrecedingChunks(article.chunks for article in held_out_world(chosen.seed).articles)
    rows: list[dict[str, Any]] = []
    with one_thread(), tempfile.TemporaryDirectory(prefix="ragcachekit-budget-") as folder:
        model, tokenizer = load_model(READER, "cpu")
        for encoder in chosen.encoders:
            check = _Check(chosen, encoder, near, model, tokenizer, Path(folder), progress)
            rows += check.rows(first, others)
    return BenchReport("budget", READER_NAME, chosen.seed, tuple(rows))


class _Check:
    """One encoder."""

    def __init__(
        self,
        settings: CheckSettings,
        encoder: str,
        near: Neighbours,
        model: Any,
        tokenizer: Any,
        folder: Path,
        progress: bool,
    ) -> None:
        self._settings, self._encoder = settings, encoder
        self._near = near
        self._model, self._tokenizer = model, tokenizer
        self._folder, self._progress = folder, progress

    def rows(
        self, first: Sequence[FidelityQuestion], others: Sequence[FidelityQuestion]
    ) -> list[dict[str, Any]]:
        record = self._calibrated(first)
        write_record(self._folder, record)
        panel = Panel(self._model, self._tokenizer, others, **self._options())
        try:
            full = panel.scores(FULL.policy)
            known: dict[str, Scores] = {FULL.policy: full}
            budgets = [self._row(record, budget, panel, full, known) for budget in self._settings.budgets]
        finally:
            panel.close()
        return [*budgets, *self._curve(record)]

    def _calibrated(self, questions: Sequence[FidelityQuestion]) -> Calibration:
        settings = CalibrateSettings(
            READER,
            encoder=self._encoder,
            budget=self._settings.budgets[0],
            policies=self._settings.policies,
            seed=self._settings.seed,
            max_new_tokens=ANSWER_TOKENS,
            cache_dir=self._folder,
        )
        sample = Sample(tuple(questions))
        model, tokenizer = self._model, self._tokenizer
        return calibrated(settings, model, tokenizer, sample, lambda: self._near, progress=self._progress)

    def _row(
        self, record: Calibration, budget: float, panel: Panel, full: Scores, known: dict[str, Scores]
    ) -> dict[str, Any]:
        """Measured under the budget's own name: the engine reads the record as a user's would."""
        point = record.cheapest(budget)
        if point.policy not in known:
            known[point.policy] = panel.scores(f"budget:{budget:g}")
        found = known[point.policy]
        loss = full.f1 - found.f1
        low, high = Bootstrap(len(loss), self._settings.seed).of_mean(loss)
        return {
            "part": "budget",
            "encoder": self._encoder,
            "budget": budget,
            "chosen": point.policy,
            "loss_calibrated": point.loss,
            "upper": point.upper,
            "n_calibrated": record.n,
            "f1_full": float(np.mean(full.f1)),
            "f1": float(np.mean(found.f1)),
            "loss": float(np.mean(loss)),
            "low": low,
            "high": high,
            "ratio_spent": float(np.mean(found.ratio)),
            "held": bool(np.mean(loss) <= budget),
            "n": len(loss),
        }

    def _curve(self, record: Calibration) -> list[dict[str, Any]]:
        return [
            {
                "part": "curve",
                "encoder": self._encoder,
                "policy": point.policy,
                "ratio_spent": point.ratio,
                "f1": point.f1,
                "loss": point.loss,
                "doubt": point.doubt,
                "upper": point.upper,
                "n": record.n,
            }
            for point in record.curve
        ]

    def _options(self) -> dict[str, Any]:
        return {
            "encoder": self._encoder,
            "neighbours": self._near if needs_neighbours(self._encoder) else None,
            "max_new_tokens": ANSWER_TOKENS,
            "cache_dir": self._folder,
            "progress": self._progress,
        }


def parts(report: BenchReport) -> dict[str, BenchReport]:
    """The report's parts by name, for one table each."""
    names = dict.fromkeys(row["part"] for row in report.rows)
    return {
        name: replace(report, rows=tuple(row for row in report.rows if row["part"] == name)) for name in names
    }
