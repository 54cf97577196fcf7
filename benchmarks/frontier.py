"""``python -m benchmarks frontier``: KL over the time to the first token, of all policies, in one picture.

Over standalone chunks, as published, and over this library's means, whose contexts hold no passage of the
measured prompt. Every policy runs on the same prompts, beside the bare model's own prefill.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm.auto import tqdm

from benchmarks.context_draws import CORPUS, DOCUMENT, draw_contexts, passages
from benchmarks.contexts import PUBLISHED, STANDALONE, Bench, Found, rows_of
from benchmarks.datasets import Sampling, draw_questions
from benchmarks.output import Plot, written
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.commands.engines import FULL
from ragcachekit.commands.questions import PromptMaker
from ragcachekit.commands.report import BenchReport, table
from ragcachekit.commands.ttft import ONE_TOKEN
from ragcachekit.commands.workspace import load_checked
from ragcachekit.plan.companions import SimilarChunks
from ragcachekit.policies.base import PolicyAndEncoder
from ragcachekit.policies.registry import open_policy

POLICIES = ",".join(
    (
        *("reuse", "lego:4", "lego:8", "lego:16", "cacheblend:0.05", "cacheblend:0.1", "cacheblend:0.15"),
        *(f"{kind}:{r}" for kind in ("query", "deep", "impact", "sensitive") for r in (0.05, 0.1, 0.15)),
    )
)
COLUMNS = ("contexts", "policy", "recomputed", "kl", "recovered", "low", "high", "ms")


def frontier(
    dataset: Annotated[str, typer.Option(help="squad:FILE or musique:FILE.")],
    model: str = "sample",
    policies: opt.Policies = POLICIES,
    count: Annotated[int, typer.Option(min=1, help="Questions.")] = 20,
    distractors: Annotated[int, typer.Option(min=1, help="Passages beside the relevant ones.")] = 4,
    half: Annotated[str, typer.Option(help="Of the dataset: all, develop or report.")] = "report",
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: Plot = None,
) -> None:
    """KL over the time to the first token: all policies, over standalone chunks and over ours."""
    quiet_loading()
    questions = draw_questions(dataset, Sampling(count, distractors, half, seed))
    corpus = passages(dataset)
    ours = DOCUMENT if all(one.document for one in questions) else CORPUS
    names = [open_policy(policy).name for policy in opt.names(policies)]
    ways = [PolicyAndEncoder(policy, over) for over in (STANDALONE, ours) for policy in names]
    ways += [PolicyAndEncoder(policy, name) for name, (_, own) in PUBLISHED.items() for policy in own[:2]]
    ways = list(dict.fromkeys((PolicyAndEncoder("reuse", STANDALONE), *ways)))
    lm, tokenizer = load_checked(model, None, "auto")
    maker, done, full = PromptMaker(tokenizer), dict[tuple[int, PolicyAndEncoder], Found](), list[float]()
    with (
        closing(Bench(lm, tokenizer, SimilarChunks(corpus, MiniLM().embed(corpus)))) as bench,
        tqdm(total=count * len(ways), unit="answer") as bar,
    ):
        for number, question in enumerate(questions):
            full.append(_first_token(lm, maker.prompt(question).token_ids))
            drawn = draw_contexts(question, questions, corpus, [], seed)
            for way, found in bench.measure(question, drawn, ways):
                done[number, way] = found
                bar.update()
    ms = 1e3 * float(np.median(full))
    base: dict[str, Any] = {"contexts": "none", "policy": FULL.policy, "recomputed": 1.0, "kl": 0.0, "ms": ms}
    rows = (base | {"recovered": 1.0, "n": count}, *rows_of(ways, done, count, seed))
    report = BenchReport("frontier", model, seed, rows)
    show(table(f"KL and the first token: {model}, {count} questions", rows, COLUMNS))
    written(report, json, plot, draw)


@torch.no_grad()
def _first_token(model: Any, ids: Sequence[int]) -> float:
    """Seconds of the bare model's prefill and first token."""
    given, started_at = torch.tensor([ids]), time.perf_counter()
    model.generate(input_ids=given, attention_mask=torch.ones_like(given), **ONE_TOKEN)
    return time.perf_counter() - started_at


def draw(report: BenchReport, path: Path) -> None:
    """Draw a line per policy and encoding; standalone chunks dashed, as published."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    full, *others = report.rows
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in sorted(others, key=lambda row: float(row["recomputed"])):
        lines.setdefault((row["policy"].partition(":")[0], row["contexts"]), []).append(row)
    families = list(dict.fromkeys(family for family, _ in lines))
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for (family, over), points in lines.items():
        is_published = over in (STANDALONE, *PUBLISHED)
        axes.plot(
            [row["ms"] for row in points],
            [row["kl"] for row in points],
            color=f"C{families.index(family)}",
            marker="o" if not is_published else "s",
            fillstyle="full" if not is_published else "none",
            linestyle="-" if not is_published else "--",
            label=f"{family} over {over}",
        )
    axes.axvline(full["ms"], color="#4d4d4d", linewidth=1, label="full prefill (KL 0)")
    axes.set(xscale="log", yscale="log", xlabel="time to the first token, ms (left is better)")
    axes.set(ylabel="KL from full prefill, nats per token (down is better)")
    axes.set_title(f"{report.model}, {full['n']} questions, medians of one prefill each", fontsize=10)
    axes.grid(alpha=0.25, which="both")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
