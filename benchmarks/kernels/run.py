"""Kernels against what the device can do at best and against torch's own, each checked in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.baselines import full_baselines, row_baselines
from benchmarks.kernels.cases import KERNELS
from benchmarks.kernels.checks import Case, distance
from benchmarks.kernels.device_timing import Ceilings, Samples, ceilings, timed
from benchmarks.kernels.sizes import QUESTION, Sizes
from ragcachekit.commands.report import BenchReport
from ragcachekit.commands.shapes import dtype_named
from ragcachekit.errors import RagCacheError


@dataclass(frozen=True)
class KernelSettings:
    """What to measure.

    Attributes
    ----------
    tokens : tuple of int
        Prompt lengths, one after the other.
    heads, kv_heads, head_dim, layers : int
        The model's sizes; the defaults are Llama 3.1 8B's.
    dtype : {"bfloat16", "float16", "float32"}
    kernels : tuple of str
        Keys of :data:`~benchmarks.kernels.cases.KERNELS`.
    runs : int
        Calls per figure.
    device : str
    seed : int
    baselines : bool
        Whether torch's own attentions are measured beside.
    graphs : bool
        Whether our kernels are timed as replays of graphs on a GPU, without the host's part of a launch.
        Baselines are not: next to their milliseconds a launch is nothing.
    """

    tokens: tuple[int, ...] = (32768, 8192)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 32
    dtype: str = "bfloat16"
    kernels: tuple[str, ...] = tuple(KERNELS)
    runs: int = 20
    device: str = "cuda"
    seed: int = 0
    baselines: bool = True
    graphs: bool = True

    def __post_init__(self) -> None:
        unknown = set(self.kernels) - set(KERNELS)
        if unknown or not self.kernels:
            raise ValueError(f"unknown kernels {sorted(unknown)}; known: {', '.join(KERNELS)}")
        if min(self.tokens, default=0) < 2 * QUESTION or self.runs < 1:
            raise ValueError(f"prompts need at least {2 * QUESTION} tokens, and runs must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads")
        dtype_named(self.dtype)


def run(settings: KernelSettings, step: Callable[[str], object] = lambda _: None) -> BenchReport:
    """Check and measure every case; ``step`` hears what comes next.

    Returns
    -------
    BenchReport
        Rows ``kernel, case, tokens, ms, ms_min, ms_max, runs, unit, achieved, ceiling, share,
        speedup_over, error`` (and ``failed`` for baselines that do not run). ``achieved`` counts the work
        that the case needs, in ``unit``; ``ceiling`` is a large matrix product or a large copy in this
        run, ``share`` the one over the other. In a baseline's row ``speedup_over`` says how many times
        quicker our kernel did that case, and ``error`` how far its result is from ours.

    Raises
    ------
    RagCacheError
        A kernel's result is wrong: no figure is given then.
    """
    device = torch.device(settings.device)
    step("what the device can do")
    best = ceilings(device, dtype_named(settings.dtype), settings.runs, settings.seed)
    rows = [
        row for tokens in settings.tokens for row in _rows(settings, _sizes(settings, tokens), best, step)
    ]
    name = (
        f"{settings.heads} query heads, {settings.kv_heads} KV heads, head dim {settings.head_dim}, "
        f"{settings.layers} layers, {settings.dtype}, random numbers"
    )
    return BenchReport("kernels", name, settings.seed, tuple(rows))


def _sizes(settings: KernelSettings, tokens: int) -> Sizes:
    return Sizes(
        tokens,
        settings.layers,
        settings.heads,
        settings.kv_heads,
        settings.head_dim,
        dtype_named(settings.dtype),
        torch.device(settings.device),
        settings.seed,
    )


def _rows(
    settings: KernelSettings, sizes: Sizes, best: Ceilings, step: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    for kernel in settings.kernels:
        for case in KERNELS[kernel](sizes):
            step(f"{kernel}, {case.name}, {sizes.tokens} tokens")
            error = case.error()
            if not error <= case.allowed:
                raise RagCacheError(
                    f"{kernel}, {case.name}, {sizes.tokens} tokens: the result is off by {error:.2g} of the "
                    f"largest value, allowed {case.allowed:.2g}; no figure is given"
                )
            ours = timed(case.calls, settings.runs, sizes.device, graphs=settings.graphs)
            yield _row(case, case.name, sizes, ours, best, None, error)
            if settings.baselines and kernel == "sparse_attention" and case.rows:
                yield from _baselines(settings, sizes, case, ours, best, step)


def _baselines(
    settings: KernelSettings,
    sizes: Sizes,
    case: Case,
    ours: Samples,
    best: Ceilings,
    step: Callable[[str], object],
) -> Iterator[dict[str, Any]]:
    """Every sparse case is also compared with a prefill's attention of all rows: that is what it replaces."""
    full = case.name == "full"
    same = [] if full else [(other, True) for other in row_baselines(sizes, case.rows)]
    for other, same_rows in [*((other, full) for other in full_baselines(sizes)), *same]:
        name = f"{case.name}: {other.name}"
        step(f"{name}, {sizes.tokens} tokens")
        difference = None
        try:
            calls = other.make()
            if same_rows and not other.prepares:
                difference = _difference(calls[0](), case.calls[0]())
            samples = timed(calls, settings.runs, sizes.device)
        except Exception as error:  # out of memory, not built in, or its own compiler gives up
            yield _failed(case, name, sizes, error)
            continue
        if difference is not None and not difference <= 2 * case.allowed:
            raise RagCacheError(f"{name}: its result and that of our kernel differ by {difference:.2g}")
        yield _row(case, name, sizes, samples, best, ours, difference)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of ``[1, heads, rows, dim]`` or ``[1, rows, heads, dim]`` from ours."""
    heads_first = found.shape[1:3] == expected.shape[:2]
    return distance(found[0] if heads_first else found[0].transpose(0, 1), expected)


def _failed(case: Case, name: str, sizes: Sizes, error: Exception) -> dict[str, Any]:
    """The row of a baseline that does not run here."""
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    empty = dict.fromkeys(("ms", "ms_min", "ms_max", "achieved", "ceiling", "share", "speedup_over", "error"))
    row = {"kernel": "baseline", "case": name, "tokens": sizes.tokens, "runs": 0, "unit": case.unit}
    return row | empty | {"failed": said[:200]}


def _row(
    case: Case,
    name: str,
    sizes: Sizes,
    samples: Samples,
    best: Ceilings,
    ours: Samples | None,
    error: float | None,
) -> dict[str, Any]:
    per_second = case.work / samples.median / (1e9 if case.unit == "TFLOP/s" else 1e6)
    return {
        "kernel": case.kernel if ours is None else "baseline",
        "case": name,
        "tokens": sizes.tokens,
        "ms": samples.median,
        "ms_min": min(samples.ms),
        "ms_max": max(samples.ms),
        "runs": len(samples.ms),
        "unit": case.unit,
        "achieved": per_second,
        "ceiling": best.of(case.unit),
        "share": per_second / best.of(case.unit),
        "speedup_over": None if ours is None else samples.median / ours.median,
        "error": error,
    }
