"""Advice from an estimate, its figures as flat rows, and the plot."""

from __future__ import annotations

import os

import numpy as np

from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.estimate.replay import DISK, HOST
from ragcachekit.commands.estimate.run import Estimate, Outcome, Row
from ragcachekit.config import StoreConfig
from ragcachekit.plan.link_plan import COMPUTED

LEAST_SPEEDUP = 1.1  # in mean time to first token, for anything to be advised
ALIKE = 1.03  # ratio of mean times up to which the simpler tiers are advised
LOGS = 10  # logs like this one within which encoding ahead must save its own time

LOG, TIERS, ADVICE = "log", "tiers", "advice"  # parts of the report

TIER_COLUMNS = (
    *("host_mb", "share_of_touched", "eviction", "disk", "precomputed"),
    *("from_host", "from_disk", "computed", "ttft_ms", "ttft_ms_p90", "speedup"),
)


def report(estimate: Estimate) -> BenchReport:
    """Rows about the log, every set of tiers, and the advice, whose ``text`` is for people."""
    tiers = ({"part": TIERS, **_tiers(estimate.log, outcome)} for outcome in estimate.outcomes)
    rows = ({"part": LOG, **estimate.log}, *tiers, {"part": ADVICE, **advice(estimate)})
    return BenchReport("estimate", estimate.settings.model, 0, rows)


def advice(estimate: Estimate) -> Row:
    """The simplest tiers that are about as good as the best, if they make enough of a difference."""
    plain, disk, ahead = (
        _simplest([o for o in estimate.outcomes if (o.tiers.disk, o.tiers.precomputed) == way])
        for way in ((False, False), (True, False), (True, True))
    )
    full, encoding = estimate.log["full_s_mean"], estimate.log["encode_corpus_s"]
    saved = float(disk.seconds.sum() - ahead.seconds.sum())
    chosen = plain if plain.mean <= ALIKE * disk.mean else disk
    if saved * LOGS >= encoding and ahead.mean * ALIKE < chosen.mean:
        chosen = ahead
    speedup, times = full / chosen.mean, f"{duration(full)} to {duration(chosen.mean)}"
    if speedup < LEAST_SPEEDUP:
        text = f"it will not help you: the mean time to the first token would go from {times}"
        return {
            "helps": False,
            "speedup": speedup,
            "store": None,
            "precompute": False,
            "text": text,
            "quality": estimate.quality,
        }
    pays, store = chosen is ahead, _store_config(estimate.log, chosen)
    only = ", but only if you run precompute first" if pays and full < LEAST_SPEEDUP * disk.mean else ""
    text = (
        f"it will save you time{only}:\n"
        f"the mean time to the first token falls from {times}, {speedup:.1f} times as quick\n"
        f"RagCache(..., policy={estimate.settings.policy!r}, store={store})\n"
        f"precompute {'pays' if pays else 'is not needed'}: it takes about {duration(encoding)} "
        f"and saves {duration(max(saved, 0))} over this log\n{estimate.quality}"
    )
    return {
        "helps": True,
        "speedup": speedup,
        "store": store,
        "precompute": pays,
        "text": text,
        "quality": estimate.quality,
    }


def _simplest(outcomes: list[Outcome]) -> Outcome:
    """The smallest host tier, with the default policy, that is about as good as the best."""
    best = min(outcome.mean for outcome in outcomes)
    good = [outcome for outcome in outcomes if outcome.mean <= ALIKE * best]
    return min(good, key=lambda o: (o.tiers.host_bytes, o.tiers.eviction != StoreConfig().eviction))


def _store_config(log: Row, chosen: Outcome) -> str:
    tiers = chosen.tiers
    parts = [f"host_bytes={_rounded(tiers.host_bytes):_}"]
    if tiers.disk:
        held = log["kv_bytes_touched"] + log["kv_bytes_corpus"] * tiers.precomputed
        parts += ['disk_path="..."', f"disk_bytes={_rounded(round(1.25 * held)):_}"]
    if tiers.eviction != StoreConfig().eviction:
        parts.append(f'eviction="{tiers.eviction}"')
    return f"StoreConfig({', '.join(parts)})"


def _rounded(nbytes: int) -> int:
    """Rounded up to whole megabytes."""
    return -(-nbytes // 1_000_000) * 1_000_000


def duration(seconds: float) -> str:
    """Seconds as text."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _tiers(log: Row, outcome: Outcome) -> Row:
    tiers, seconds = outcome.tiers, outcome.seconds
    return {
        **vars(tiers),
        "host_mb": tiers.host_bytes / 1e6,
        "share_of_touched": tiers.host_bytes / log["kv_bytes_touched"],
        "from_host": outcome.share(HOST),
        "from_disk": outcome.share(DISK),
        "computed": outcome.share(COMPUTED),
        "ttft_ms": float(np.median(seconds)) * 1e3,
        "ttft_ms_p90": float(np.quantile(seconds, 0.9)) * 1e3,
        "ttft_ms_mean": outcome.mean * 1e3,
        "speedup": log["full_s_mean"] / outcome.mean,
    }


def plot(found: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw hit rate and mean time to first token over host bytes."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    figure = Figure(figsize=(10, 4), layout="constrained")
    hits, times = figure.subplots(1, 2)
    lines: dict[str, list[Row]] = {}
    for row in found.part(TIERS).rows:
        label = row["eviction"] + " + disk" * row["disk"] + ", precomputed" * row["precomputed"]
        lines.setdefault(label, []).append(row)
    for label, line in lines.items():
        x = [row["host_mb"] for row in line]
        hits.plot(x, [row["from_host"] for row in line], "o-", label=label)
        times.plot(x, [row["ttft_ms_mean"] for row in line], "o-", label=label)
    full = found.rows[0]["full_s_mean"] * 1e3
    times.axhline(full, color="#4d4d4d", linewidth=1, label="full prefill")
    hits.set(xscale="log", xlabel="host memory (MB)", ylabel="chunks found in host memory", ylim=(0, 1.02))
    times.set(xscale="log", xlabel="host memory (MB)", ylabel="mean time to first token (ms)", ylim=(0, None))
    times.legend(fontsize=7)
    figure.suptitle(f"estimate: {found.model}", fontsize=10)
    figure.savefig(path, dpi=150)
