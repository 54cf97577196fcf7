"""An estimate as flat rows, and as a picture."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.estimate.advice import Advice
from ragcachekit.commands.estimate.replay import DISK, HOST
from ragcachekit.commands.estimate.run import Estimate, Outcome
from ragcachekit.plan.link_plan import COMPUTED
from ragcachekit.policies.registry import open_policy

LOG, TIERS, POLICIES, ADVICE = "log", "tiers", "policies", "advice"
"""Parts that rows belong to."""

FULL, REUSE = "full", "reuse"
TIER_COLUMNS = (
    *("host_mb", "share_of_touched", "eviction", "disk", "precomputed"),
    *("from_host", "from_disk", "computed", "ttft_ms", "ttft_ms_p90", "speedup"),
)


def report(estimate: Estimate, advice: Advice) -> BenchReport:
    """All rows: what the log is like, every set of tiers, policies on the advised one, the advice."""
    rows = [_log(estimate), *(_tiers(estimate, outcome) for outcome in estimate.outcomes)]
    rows += _policies(estimate, advice.outcome)
    rows.append(
        {
            "part": ADVICE,
            "helps": advice.helps,
            "speedup": advice.speedup,
            "store": advice.config,
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
    requests, tokens = estimate.requests, [request.tokens for request in estimate.requests]
    chunk_tokens = sum(use.chunk.tokens for request in requests for use in request.chunks)
    row: dict[str, Any] = {
        "part": LOG,
        "questions": len(estimate.log),
        "repeated": estimate.retrievals.same,
        **{f"near_{t:g}": count for t, count in estimate.retrievals.near.items()},
        "prompt_tokens": float(np.median(tokens)),
        "chunk_token_share": chunk_tokens / sum(tokens),
        "chunk_uses": estimate.chunk_uses,
        "chunks_touched": estimate.touched_chunks,
        "chunk_reuse": estimate.reuse,
        "chunks_not_in_corpus": estimate.foreign_chunks,
        "chunks_in_corpus": estimate.corpus_chunks,
        "kv_bytes_corpus": estimate.corpus_bytes,
        "kv_bytes_touched": estimate.touched_bytes,
        "encode_corpus_s": estimate.encode_seconds,
        "measured": estimate.settings.measure,
        "disk_gb_per_s": estimate.speeds.disk / 1e9,
    }
    answers = [
        (full, query.answer_tokens * estimate.speeds.profile.seconds(request.tokens, 1))
        for full, query, request in zip(estimate.full, estimate.log, requests, strict=True)
        if query.answer_tokens is not None
    ]
    if answers:
        row["ttft_share_of_answer"] = float(sum(a for a, _ in answers) / sum(a + b for a, b in answers))
    times = [query.time for query in estimate.log if query.time is not None]
    if len(times) == len(estimate.log) > 1:
        row["hours"] = (max(times) - min(times)) / 3600
    return row


def _tiers(estimate: Estimate, outcome: Outcome) -> dict[str, Any]:
    host, disk = outcome.rate(HOST), outcome.rate(DISK)
    return {
        "part": TIERS,
        "host_bytes": outcome.tiers.host_bytes,
        "host_mb": outcome.tiers.host_bytes / 1e6,
        "share_of_touched": outcome.tiers.host_bytes / estimate.touched_bytes,
        "eviction": outcome.tiers.eviction,
        "disk": outcome.tiers.disk,
        "precomputed": outcome.tiers.precomputed,
        "from_host": host,
        "from_disk": disk,
        "computed": outcome.rate(COMPUTED),
        **_times(outcome.seconds),
        "speedup": estimate.mean_full / outcome.mean,
    }


def _policies(estimate: Estimate, outcome: Outcome) -> list[dict[str, Any]]:
    """Time to first token on one set of tiers, of full, the policy asked for, and plain reuse."""
    seconds = {FULL: estimate.full, estimate.settings.policy: outcome.seconds}
    if REUSE not in seconds:
        reuse = open_policy(REUSE)
        seconds[REUSE] = np.array([estimate.speeds.served(served, reuse) for served in outcome.served])
    return [
        {
            "part": POLICIES,
            "policy": name,
            **_times(times),
            "speedup": estimate.mean_full / float(times.mean()),
        }
        for name, times in seconds.items()
    ]


def _times(seconds: NDArray[np.float64]) -> dict[str, float]:
    return {
        "ttft_ms": float(np.median(seconds)) * 1e3,
        "ttft_ms_p90": float(np.quantile(seconds, 0.9)) * 1e3,
        "ttft_ms_mean": float(seconds.mean()) * 1e3,
    }


def plot(found: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw hit rate and mean time to first token over host bytes; the ending says which kind of image."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = part(found, TIERS).rows
    figure = Figure(figsize=(10, 4), layout="constrained")
    hits, times = figure.subplots(1, 2)
    for tiers in dict.fromkeys((row["eviction"], row["disk"], row["precomputed"]) for row in rows):
        line = [row for row in rows if (row["eviction"], row["disk"], row["precomputed"]) == tiers]
        eviction, disk, precomputed = tiers
        label = eviction + (" + disk" if disk else "") + (", precomputed" if precomputed else "")
        x = [row["host_mb"] for row in line]
        for axes, name in ((hits, "from_host"), (times, "ttft_ms_mean")):
            axes.plot(x, [row[name] for row in line], "o-" if precomputed else "o--", label=label)
    full = next(row for row in found.rows if row.get("policy") == FULL)
    times.axhline(full["ttft_ms_mean"], color="#4d4d4d", linewidth=1, label="full prefill")
    hits.set(xscale="log", xlabel="host memory (MB)", ylabel="chunks found in host memory", ylim=(0, 1.02))
    times.set(xscale="log", xlabel="host memory (MB)", ylabel="mean time to first token (ms)", ylim=(0, None))
    times.legend(fontsize=7)
    figure.suptitle(f"estimate: {found.model}", fontsize=10)
    figure.savefig(path, dpi=150)
