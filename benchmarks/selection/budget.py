"""``python -m benchmarks budget``: does a quality budget hold on questions that it was not calibrated on?"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer
from tqdm.auto import tqdm

from benchmarks.world.questions import KINDS, world_sample
from benchmarks.world.reader_folder import ANSWER_TOKENS, READER, READER_NAME, one_thread
from ragcachekit.commands import options as opt
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.calibrate import ROUND, Loss, Losses, candidates, race
from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.engines import FULL, Engines
from ragcachekit.commands.questions import DOCUMENT, PromptMaker
from ragcachekit.model.pretrained import load_model
from ragcachekit.policies.measured import Budget

Row = dict[str, Any]


def budget(
    budgets: Annotated[str, typer.Option("--budgets", help="With commas between.")] = "0.05,0.1,0.2,0.4",
    encoders: opt.Encoders = "standalone,similar:1",
    policies: opt.Policies = None,
    questions: Annotated[int, typer.Option(min=1, help="Asked of every candidate.")] = 150,
    calibrate_on: Annotated[int, typer.Option("--calibrate-on", help="Questions of a calibration.")] = 30,
    repeats: Annotated[int, typer.Option(min=1, help="Calibrations.")] = 200,
    seed: opt.Seed = 0,
    json: opt.Json = None,
) -> None:
    """Whether quality budgets hold: calibrated on some questions, checked on others."""
    quiet_loading()
    settings = CheckSettings(
        budgets=opt.numbers("--budgets", budgets),
        encoders=opt.names(encoders),
        policies=opt.names(policies),
        questions=questions,
        calibrate_on=calibrate_on,
        repeats=repeats,
        seed=seed,
    )
    report = run(settings, progress=True)
    show(report.part("budget").table(f"Budgets, checked on other questions: {report.model}"))
    show(report.part("losses").table("Loss per question, nats per token of full's answer"))
    written(report, json)


@dataclass(frozen=True)
class CheckSettings:
    """``repeats`` calibrations on ``calibrate_on`` of the questions, each checked on the others."""

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


def run(settings: CheckSettings, *, progress: bool = False) -> BenchReport:
    """Ask every candidate every question, then calibrate on many draws of them.

    One row per encoder and budget: ``held`` is the share of calibrations whose policy lost at most the budget
    on the questions that were not drawn (``full`` loses nothing); ``chosen`` counts policies. And the mean
    losses, ``part`` = ``losses``.
    """
    rows: list[Row] = []
    for encoder in settings.encoders:
        policies = candidates(settings.policies, encoder)
        table = _table(settings, encoder, policies, progress)
        numbers = tqdm(settings.budgets, desc=f"calibrating, {encoder}", disable=not progress)
        rows += [_row(settings, encoder, policies, table, budget) for budget in numbers]
        for policy, column in zip(policies, zip(*table, strict=True), strict=True):
            kls = [loss.kl for loss in column]
            row = {"part": "losses", "encoder": encoder, "policy": policy, "n": len(column)}
            row |= {"ratio_spent": float(np.mean([loss.ratio for loss in column]))}
            row |= {"kl": float(np.mean(kls)), "kl_p90": float(np.quantile(kls, 0.9)), "kl_max": max(kls)}
            rows.append(row)
    return BenchReport("budget", READER_NAME, settings.seed, tuple(rows))


def _table(
    settings: CheckSettings, encoder: str, policies: Sequence[str], progress: bool
) -> list[list[Loss]]:
    """Losses ``[questions][policies]``."""
    sample = world_sample(settings.seed, -(-settings.questions // len(KINDS)))
    questions = sample.questions[: settings.questions]
    near = sample.neighbours(DOCUMENT) if encoder.startswith("similar") else None
    with one_thread(), tempfile.TemporaryDirectory(prefix="ragcachekit-budget-") as folder:
        model, tokenizer = load_model(READER, "cpu")
        options: dict[str, Any] = {"max_new_tokens": ANSWER_TOKENS, "neighbours": near, "cache_dir": folder}
        with closing(Engines(model, tokenizer, [encoder], **options)) as engines:
            losses = Losses(engines, PromptMaker(tokenizer), questions, encoder)
            numbers = tqdm(range(len(questions)), desc=encoder, unit="question", disable=not progress)
            return [losses.of(number, policies) for number in numbers]


def _row(
    settings: CheckSettings, encoder: str, policies: Sequence[str], table: list[list[Loss]], budget: float
) -> Row:
    rng, losses = np.random.default_rng(settings.seed), np.array([[one.loss for one in row] for row in table])
    column = {policy: at for at, policy in enumerate(policies)}
    names, lost, answers = Counter[str](), list[float](), list[int]()
    for _ in range(settings.repeats):
        order = rng.permutation(len(table))
        drawn, others = order[: settings.calibrate_on].tolist(), order[settings.calibrate_on :]
        found = race(
            lambda number, racing: [table[number][column[name]] for name in racing], policies, drawn, budget
        )
        within = [one for one in found if one.decision(budget) == "within"]
        name = min(within, key=lambda one: one.mean.ratio).policy if within else FULL.policy
        names[name] += 1
        lost.append(float(losses[others, column[name]].mean()) if within else 0.0)
        answers.append(sum(len(one.losses) for one in found))
    return {
        "part": "budget",
        "encoder": encoder,
        "budget": budget,
        "held": float(np.mean(np.array(lost) <= budget)),
        "loss": float(np.mean(lost)),
        "loss_p90": float(np.quantile(lost, 0.9)),
        "answers": float(np.mean(answers)),
        "chosen": ", ".join(f"{name} {count}" for name, count in names.most_common()),
        "repeats": settings.repeats,
    }
