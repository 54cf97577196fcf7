"""Does a quality budget hold? Calibrated on a few questions about the sample world, checked on the others."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from benchmarks.world.questions import KINDS, held_out_world, world_questions
from benchmarks.world.reader_folder import ANSWER_TOKENS, READER, READER_NAME, one_thread
from ragcachekit.commands.bench.fidelity.engines import FULL, needs_neighbours
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.calibrate.losses import Loss, Panel
from ragcachekit.commands.calibrate.race import ROUND, WITHIN, Bounds, decision, race
from ragcachekit.commands.calibrate.run import candidates
from ragcachekit.model.pretrained import load_model
from ragcachekit.plan.neighbours import PrecedingChunks
from ragcachekit.policies.budgets.budget import Budget

Row = dict[str, Any]


@dataclass(frozen=True)
class CheckSettings:
    """What is measured and how often it is calibrated.

    Attributes
    ----------
    budgets : tuple of float
        Nats per token of the answer.
    encoders : tuple of str
        ``similar:n`` gets the chunks before in the article as neighbours.
    policies : tuple of str
        Candidates; default: those of this version.
    questions : int
        Asked of every candidate, once.
    calibrate_on : int
        Questions of one calibration, at most, drawn from them; the others check it.
    repeats : int
        Calibrations per budget.
    seed : int
        Of the sample world, the draws and the bootstrap.
    """

    budgets: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    encoders: tuple[str, ...] = ("standalone", "similar:1")
    policies: tuple[str, ...] = ()
    questions: int = 150
    calibrate_on: int = 30
    repeats: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.budgets or not self.encoders:
            raise ValueError("give at least one budget and one encoder")
        for budget in self.budgets:
            Budget(budget)
        if not ROUND <= self.calibrate_on < self.questions:
            raise ValueError(f"calibrate on at least {ROUND} questions, and on fewer than are asked in all")


def run(settings: CheckSettings | None = None, *, progress: bool = False) -> BenchReport:
    """Ask every candidate every question, then calibrate on many draws of them.

    Returns
    -------
    BenchReport
        One row per encoder and budget: ``held`` is the share of calibrations whose policy lost at most the
        budget on the questions that were not drawn (``full`` loses nothing); ``chosen`` counts policies.
        And the mean losses, ``part`` = ``losses``.

    Raises
    ------
    ValueError
        For bad budgets, encoders or policies, or more questions than the world has.
    """
    chosen = settings or CheckSettings()
    rows: list[Row] = []
    for encoder in chosen.encoders:
        policies = candidates(chosen.policies, encoder)
        table = _table(chosen, encoder, policies, progress)
        rows += [
            _row(chosen, encoder, policies, table, budget)
            for budget in tqdm(chosen.budgets, desc=f"calibrating, {encoder}", disable=not progress)
        ]
        rows += [
            {
                "part": "losses",
                "encoder": encoder,
                "policy": policy,
                "ratio_spent": float(np.mean([loss.ratio for loss in column])),
                "kl": float(np.mean([loss.kl for loss in column])),
                "kl_p90": float(np.quantile([loss.kl for loss in column], 0.9)),
                "kl_max": max(loss.kl for loss in column),
                "n": len(column),
            }
            for policy, column in zip(policies, zip(*table, strict=True), strict=True)
        ]
    return BenchReport("budget", READER_NAME, chosen.seed, tuple(rows))


def _table(
    settings: CheckSettings, encoder: str, policies: Sequence[str], progress: bool
) -> list[list[Loss]]:
    """Losses ``[questions][policies]``."""
    per_type = -(-settings.questions // len(KINDS))
    questions = world_questions(settings.seed, per_type)[: settings.questions]
    near = PrecedingChunks(article.chunks for article in held_out_world(settings.seed).articles)
    with one_thread(), tempfile.TemporaryDirectory(prefix="ragcachekit-budget-") as folder:
        model, tokenizer = load_model(READER, "cpu")
        panel = Panel(
            model,
            tokenizer,
            questions,
            encoder=encoder,
            neighbours=near if needs_neighbours(encoder) else None,
            max_new_tokens=ANSWER_TOKENS,
            cache_dir=folder,
        )
        numbers = tqdm(range(len(questions)), desc=encoder, unit="question", disable=not progress)
        with closing(panel):
            return [list(panel.losses(at, policies)) for at in numbers]


def _row(
    settings: CheckSettings, encoder: str, policies: Sequence[str], table: list[list[Loss]], budget: float
) -> Row:
    rng, bounds = np.random.default_rng(settings.seed), Bounds(settings.seed)
    losses = np.array([[loss.loss for loss in row] for row in table])
    column = {policy: at for at, policy in enumerate(policies)}
    names, lost, asked, answers, ratios = (
        Counter[str](),
        list[float](),
        list[int](),
        list[int](),
        list[float](),
    )
    for _ in range(settings.repeats):
        order = rng.permutation(len(table))
        drawn, others = order[: settings.calibrate_on].tolist(), order[settings.calibrate_on :]
        found = race(
            lambda at, racing: [table[at][column[name]] for name in racing], policies, drawn, budget, bounds
        )
        within = [one for one in found if decision(one, found, budget) == WITHIN]
        name = min(within, key=lambda one: one.cost).policy if within else FULL.policy
        names[name] += 1
        lost.append(float(losses[others, column[name]].mean()) if within else 0.0)
        ratios.append(within[0].mean("ratio") if within else 1.0)
        asked.append(max(len(one.losses) for one in found))
        answers.append(sum(len(one.losses) for one in found))
    return {
        "part": "budget",
        "encoder": encoder,
        "budget": budget,
        "held": float(np.mean(np.array(lost) <= budget)),
        "loss": float(np.mean(lost)),
        "loss_p90": float(np.quantile(lost, 0.9)),
        "ratio_spent": float(np.mean(ratios)),
        "asked": float(np.mean(asked)),
        "answers": float(np.mean(answers)),
        "chosen": ", ".join(f"{name} {count}" for name, count in names.most_common()),
        "repeats": settings.repeats,
    }
