"""Does the planner take the quicker way? Over simulated tiers and models, with noisy measurements."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from benchmarks.planner.pipeline import Machine, Medium, prefill_seconds, read_layers
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.model.prefill_timing import CACHED, NEW, extended
from ragcachekit.plan.load_planner import Candidate, LoadPlanner
from ragcachekit.plan.row_cost import ScoringPass

BANDWIDTHS = (50e6, 150e6, 500e6, 1.5e9, 5e9, 15e9)
LATENCIES = (50e-6, 1e-3, 10e-3)
CHUNKS = (1, 2, 4, 8)
SPEEDS = (500, 2_000, 8_000, 32_000)
"""Rows per second of a prefill."""

TOLERANCE = 0.05
"""A pick is right if it takes at most this much longer than the best one."""

POLICIES = {"reuse": 0.0, "query:0.15": 0.15}
"""Share of what is loaded that is recomputed, chosen in a pass of its own; 0: neither."""

LAYERS, KV_BYTES, READERS = 24, 4096, 2
"""Of the model: layers, bytes per row and layer; and reads at once."""

READ_NOISE = 5
"""How much more a single read's time varies than a prefill's; there are hundreds of reads to average."""

_QUESTION = 64
_PAST_LOADS = 4
_TOKENS = (128, 900)


@dataclass(frozen=True)
class Case:
    """One request on one machine."""

    machine: Machine
    medium: Medium
    tokens: tuple[int, ...]
    ratio: float = 0.0

    def recomputed(self, chunk: int) -> int:
        """Rows of a chunk that are computed even if it is loaded."""
        return math.ceil(self.ratio * self.tokens[chunk])

    def seconds(self, loaded: Iterable[int]) -> float:
        """True time if these chunks are loaded and the others computed."""
        loaded = list(loaded)
        cached = sum(self.tokens[i] for i in loaded)
        rows = _QUESTION + sum(self.tokens) - cached
        sizes = [self.tokens[i] * KV_BYTES for i in loaded]
        chosen = sum(map(self.recomputed, loaded)) if self.ratio and loaded else None
        return prefill_seconds(sizes, cached, rows, self.machine, self.medium, READERS, chosen)

    def best(self) -> float:
        """Least true time over all subsets of chunks."""
        subsets = itertools.chain.from_iterable(
            itertools.combinations(range(len(self.tokens)), n) for n in range(len(self.tokens) + 1)
        )
        return min(map(self.seconds, subsets))


def run(*, draws: int = 3, noise: float = 0.05, seed: int = 0, progress: bool = True) -> BenchReport:
    """Let the planner pick in every cell of policy x bandwidth x latency x chunks x model speed.

    What it knows comes from measurements like those it gets at work: reads of a few earlier loads, and
    prefills of the profile's grid, each off by a log-normal factor. What is right comes from simulating
    every subset of chunks event by event.

    Parameters
    ----------
    draws : int
        Requests per cell, with chunks of random lengths.
    noise : float
        Standard deviation of the logarithm of that factor for a prefill; :data:`READ_NOISE` times as
        much for a read.
    seed : int
    progress : bool
        Show a bar.

    Returns
    -------
    BenchReport
        Rows ``policy, bandwidth_mb_s, latency_ms, chunks, rows_per_s, quicker, right, strict, regret,
        regret_always, regret_never, loaded, n``. ``quicker`` is the share of picks that take no longer
        than the quicker of loading everything and computing everything, ``right`` of those that take no
        longer than the best of all subsets, both but for :data:`TOLERANCE`; ``strict`` of those that are
        such a best subset. Regrets are mean extra time over it, of the planner, of loading everything and
        of computing everything; ``loaded`` is the share of chunks.
    """
    if draws < 1 or noise < 0:
        raise ValueError(f"draws must be at least 1 and noise >= 0, got {draws} and {noise}")
    cells = list(itertools.product(POLICIES, BANDWIDTHS, LATENCIES, CHUNKS, SPEEDS))
    rng = np.random.default_rng(seed)
    rows = [
        _cell(*cell, draws=draws, noise=noise, rng=rng)
        for cell in tqdm(cells, disable=not progress, desc="planner", unit="cell")
    ]
    return BenchReport("planner", "simulated", seed, tuple(rows))


def summary(report: BenchReport, by: Sequence[str] = ()) -> tuple[dict[str, Any], ...]:
    """Means over all cells, or per value of the columns ``by``."""
    figures = ("quicker", "right", "strict", "regret", "regret_always", "regret_never", "loaded")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in report.rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return tuple(
        {
            **dict(zip(by, key, strict=True)),
            **{name: float(np.mean([row[name] for row in rows])) for name in figures},
            "n": sum(row["n"] for row in rows),
        }
        for key, rows in groups.items()
    )


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Heat maps over bandwidth and model speed: share of chunks loaded, share of right picks."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    found = summary(report, ("rows_per_s", "bandwidth_mb_s"))
    shape = len(SPEEDS), len(BANDWIDTHS)
    cells = sorted(found, key=lambda row: (row["rows_per_s"], row["bandwidth_mb_s"]))
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loaded", "right"), strict=True):
        values = np.reshape([row[name] for row in cells], shape)
        drawn = axes.imshow(values, vmin=0, vmax=1, aspect="auto", cmap="viridis", origin="lower")
        for (y, x), value in np.ndenumerate(values):
            axes.text(x, y, f"{value:.0%}", ha="center", va="center", color="w" if value < 0.7 else "k")
        axes.set_xticks(range(shape[1]), [f"{b / 1e6:,.0f}" for b in BANDWIDTHS])
        axes.set_yticks(range(shape[0]), [f"{s:,}" for s in SPEEDS])
        axes.set_xlabel("bandwidth of the tier (MB/s)")
        axes.set_ylabel("rows prefilled per second")
        axes.set_title({"loaded": "chunks loaded", "right": "picks within 5 % of the best"}[name], fontsize=9)
        figure.colorbar(drawn, ax=axes)
    figure.savefig(path)


def _cell(
    policy: str,
    bandwidth: float,
    latency: float,
    chunks: int,
    speed: float,
    *,
    draws: int,
    noise: float,
    rng: np.random.Generator,
) -> dict[str, Any]:
    medium = Medium(latency, bandwidth)
    # Attention over 2,000 rows costs half as much as everything else.
    machine = Machine(LAYERS, 2e-3, 1 / speed, 0.25 / speed / 1000)
    found = []
    for _ in range(draws):
        case = Case(machine, medium, tuple(rng.integers(*_TOKENS, chunks).tolist()), POLICIES[policy])
        picked = _pick(case, noise, rng)
        best, own = case.best(), case.seconds(picked)
        always, never = case.seconds(range(chunks)), case.seconds(())
        found.append([own, always, never, best, len(picked) / chunks])
    own, always, never, best, loaded = np.array(found).T
    return {
        "policy": policy,
        "bandwidth_mb_s": bandwidth / 1e6,
        "latency_ms": latency * 1e3,
        "chunks": chunks,
        "rows_per_s": speed,
        "quicker": float(np.mean(own <= np.minimum(always, never) * (1 + TOLERANCE))),
        "right": float(np.mean(own <= best * (1 + TOLERANCE))),
        "strict": float(np.mean(own <= best * (1 + 1e-9))),
        "regret": float(np.mean(own / best - 1)),
        "regret_always": float(np.mean(always / best - 1)),
        "regret_never": float(np.mean(never / best - 1)),
        "loaded": float(np.mean(loaded)),
        "n": draws,
    }


def _pick(case: Case, noise: float, rng: np.random.Generator) -> list[int]:
    """Chunks that a planner loads which has measured this machine."""

    def off(deviation: float) -> float:
        return float(rng.lognormal(0.0, deviation))

    read_noise = READ_NOISE * noise

    points = [
        (cached, new, case.machine.seconds(cached, new) * off(noise))
        for cached in (0, CACHED)
        for new in (4, *NEW)
        for _ in range(2)
    ]
    planner = LoadPlanner(extended(points), READERS)
    for _ in range(_PAST_LOADS):
        past = rng.integers(*_TOKENS, rng.integers(1, 6)) * KV_BYTES
        for read in read_layers(past.tolist(), LAYERS, case.medium, READERS)[1]:
            planner.observe_read("disk", int(read.nbytes), read.seconds * off(read_noise), int(read.beside))
    candidates = [
        Candidate("disk", LAYERS, tokens * KV_BYTES, LAYERS, tokens - case.recomputed(i), case.recomputed(i))
        for i, tokens in enumerate(case.tokens)
    ]
    guide = ScoringPass(_QUESTION) if case.ratio else None
    chosen = planner.choose(candidates, _QUESTION + sum(case.tokens), _QUESTION, guide)
    return [i for i, load in enumerate(chosen) if load]
