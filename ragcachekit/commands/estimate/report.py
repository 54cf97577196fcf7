"""Advice from an estimate, its figures as flat rows, and the plot."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.estimate.replay import DISK, HOST
from ragcachekit.commands.estimate.run import Estimate, Outcome
from ragcachekit.config import StoreConfig
from ragcachekit.plan.link_plan import COMPUTED

LEAST_SPEEDUP = 1.1
"""Least advantage in mean time to first token for which anything is advised."""

ALIKE = 1.03
"""Ratio of mean times below which tiers count as equal; the simpler ones are then advised."""

LOGS = 10
"""Number of logs like this one within which encoding ahead must save its own time."""

LOG, TIERS, ADVICE = "log", "tiers", "advice"
"""Parts of the report."""

TIER_COLUMNS = (
    *("host_mb", "share_of_touched", "eviction", "disk", "precomputed"),
    *("from_host", "from_disk", "computed", "ttft_ms", "ttft_ms_p90", "speedup"),
)


@dataclass(frozen=True)
class Advice:
    """What is advised: the ``StoreConfig(...)`` to copy and whether to precompute; None if nothing helps."""

    speedup: float
    store: str | None
    precompute: bool
    lines: tuple[str, ...]


def advise(estimate: Estimate) -> Advice:
    """The simplest tiers that are about as good as the best, if they make enough of a difference."""
    plain, disk, ahead = (
        _simplest([o for o in estimate.outcomes if (o.tiers.disk, o.tiers.precomputed) == way])
        for way in ((False, False), (True, False), (True, True))
    )
    saved = float(disk.seconds.sum() - ahead.seconds.sum())
    chosen = plain if plain.mean <= ALIKE * disk.mean else disk
    if saved * LOGS >= estimate.figures.encode_corpus_s and ahead.mean * ALIKE < chosen.mean:
        chosen = ahead
    full = estimate.figures.full_s_mean
    speedup = full / chosen.mean
    times = f"{_ms(full)} to {_ms(chosen.mean)}"
    if speedup < LEAST_SPEEDUP:
        why_not = f"it will not help you: the mean time to the first token would go from {times}, because"
        return Advice(speedup, None, False, (why_not, *_reasons(estimate)))
    precompute, store = chosen.tiers.precomputed, _store_config(estimate, chosen)
    only = ", but only if you run precompute first" if precompute and full < LEAST_SPEEDUP * disk.mean else ""
    lines = (
        f"it will help you{only}:",
        f"the mean time to the first token falls from {times}, {speedup:.1f} times as quick",
        f"RagCache(..., policy={estimate.settings.policy!r}, store={store})",
        _about_precompute(estimate, saved, precompute),
    )
    return Advice(speedup, store, precompute, lines)


def _simplest(outcomes: list[Outcome]) -> Outcome:
    """The smallest host tier, with the default policy, that is about as good as the best."""
    best = min(outcome.mean for outcome in outcomes)
    good = [outcome for outcome in outcomes if outcome.mean <= ALIKE * best]
    return min(good, key=lambda o: (o.tiers.host_bytes, o.tiers.eviction != StoreConfig().eviction))


def _store_config(estimate: Estimate, chosen: Outcome) -> str:
    tiers = chosen.tiers
    parts = [f"host_bytes={_rounded(tiers.host_bytes):_}"]
    if tiers.disk:
        held = estimate.figures.kv_bytes_touched + estimate.figures.kv_bytes_corpus * tiers.precomputed
        parts += ['disk_path="..."', f"disk_bytes={_rounded(round(1.25 * held)):_}"]
    if tiers.eviction != StoreConfig().eviction:
        parts.append(f'eviction="{tiers.eviction}"')
    return f"StoreConfig({', '.join(parts)})"


def _rounded(nbytes: int) -> int:
    """Rounded up to two digits, and to whole megabytes."""
    step = max(int(10 ** (len(str(nbytes)) - 2)), 1_000_000)
    return -(-nbytes // step) * step


def _about_precompute(estimate: Estimate, saved: float, advised: bool) -> str:
    seconds = estimate.figures.encode_corpus_s
    cost = f"about {duration(seconds)}"
    if saved <= 0:
        return f"precompute does not pay: it takes {cost} and no question is answered sooner"
    count = math.ceil(seconds / (saved / estimate.figures.questions))
    after = f"it takes {cost} and has saved that after about {count} questions like these"
    return f"precompute {'pays' if advised else 'is not needed'}: {after}"


def _reasons(estimate: Estimate) -> Iterator[str]:
    figures = estimate.figures
    if fallbacks := [request.fallback for request in estimate.requests if request.fallback]:
        count = f"{len(fallbacks)} of {figures.questions}"
        yield f"{count} prompts cannot be taken apart into chunks ({fallbacks[0]})"
    if figures.chunk_reuse < 0.1:
        yield (
            f"chunks hardly come back: {figures.chunks_touched} different ones in {figures.chunk_uses} uses "
            f"({figures.chunk_reuse:.0%} of the uses find a chunk that was used before)"
        )
    yield (
        f"{figures.chunk_token_share:.0%} of the prompts' tokens are retrieved text, the rest is computed "
        "every time; so are the tokens of short chunks that the policy recomputes"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def duration(seconds: float) -> str:
    """Seconds as text, in minutes if there are many."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:,.0f} minutes"


def report(estimate: Estimate, advice: Advice) -> BenchReport:
    """Rows about the log, every set of tiers, and the advice."""
    rows = [_log(estimate), *(_tiers(estimate, outcome) for outcome in estimate.outcomes)]
    rows.append(
        {
            "part": ADVICE,
            "helps": advice.store is not None,
            "speedup": advice.speedup,
            "store": advice.store,
            "precompute": advice.precompute,
            "text": " | ".join(advice.lines),
        }
    )
    return BenchReport("estimate", estimate.settings.model, 0, tuple(rows))


def part(found: BenchReport, name: str) -> BenchReport:
    """The report with the rows of one part only."""
    rows = tuple(row for row in found.rows if row["part"] == name)
    return BenchReport(found.bench, found.model, found.seed, rows)


def _log(estimate: Estimate) -> dict[str, Any]:
    near = {f"near_{tolerance:g}": count for tolerance, count in estimate.near.items()}
    speed = {"measured": estimate.settings.measure, "disk_gb_per_s": estimate.speeds.disk / 1e9}
    return {"part": LOG, **vars(estimate.figures), **near, **speed}


def _tiers(estimate: Estimate, outcome: Outcome) -> dict[str, Any]:
    tiers, seconds = outcome.tiers, outcome.seconds
    return {
        "part": TIERS,
        **vars(tiers),
        "host_mb": tiers.host_bytes / 1e6,
        "share_of_touched": tiers.host_bytes / estimate.figures.kv_bytes_touched,
        "from_host": outcome.rate(HOST),
        "from_disk": outcome.rate(DISK),
        "computed": outcome.rate(COMPUTED),
        "ttft_ms": float(np.median(seconds)) * 1e3,
        "ttft_ms_p90": float(np.quantile(seconds, 0.9)) * 1e3,
        "ttft_ms_mean": outcome.mean * 1e3,
        "speedup": estimate.figures.full_s_mean / outcome.mean,
    }


def plot(found: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw hit rate and mean time to first token over host bytes."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = part(found, TIERS).rows
    figure = Figure(figsize=(10, 4), layout="constrained")
    hits, times = figure.subplots(1, 2)
    for eviction, disk, ahead in dict.fromkeys((r["eviction"], r["disk"], r["precomputed"]) for r in rows):
        line = [r for r in rows if (r["eviction"], r["disk"], r["precomputed"]) == (eviction, disk, ahead)]
        label = eviction + (" + disk" if disk else "") + (", precomputed" if ahead else "")
        x = [row["host_mb"] for row in line]
        for axes, name in ((hits, "from_host"), (times, "ttft_ms_mean")):
            axes.plot(x, [row[name] for row in line], "o-" if ahead else "o--", label=label)
    full = found.rows[0]["full_s_mean"] * 1e3
    times.axhline(full, color="#4d4d4d", linewidth=1, label="full prefill")
    hits.set(xscale="log", xlabel="host memory (MB)", ylabel="chunks found in host memory", ylim=(0, 1.02))
    times.set(xscale="log", xlabel="host memory (MB)", ylabel="mean time to first token (ms)", ylim=(0, None))
    times.legend(fontsize=7)
    figure.suptitle(f"estimate: {found.model}", fontsize=10)
    figure.savefig(path, dpi=150)
