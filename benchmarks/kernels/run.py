"""Kernels against what the device can do at best and against torch's own, each checked in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.kernels.assembly import assembly_cases
from benchmarks.kernels.attention import attention_cases
from benchmarks.kernels.baselines import full_baselines, row_baselines
from benchmarks.kernels.cases import QUESTION, Case, Sizes, distance
from benchmarks.kernels.device_timing import Ceilings, Samples, ceilings, timed
from benchmarks.kernels.scores import score_cases
from benchmarks.shapes import dtype_named
from ragcachekit.commands.console import errors, note, show, written
from ragcachekit.commands.options import Device, Json, Seed, names, numbers
from ragcachekit.commands.report import BenchReport
from ragcachekit.errors import RagCacheError

KERNELS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "sparse_attention": attention_cases,
    "column_scores": score_cases,
    "assembly": assembly_cases,
}
"""By name; each makes its inputs when it is asked for the next case."""


def kernels(
    tokens: Annotated[str | None, typer.Option(help="Prompt lengths, with commas between.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=16)] = 128,
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 (a GPU's default), float16, float32 (a CPU's).")
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option("--kernels", help="sparse_attention, column_scores, assembly; default: all."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Calls per figure; the median counts.")] = 20,
    device: Device = None,
    seed: Seed = 0,
    baselines: Annotated[bool, typer.Option(help="torch's own attentions beside.")] = True,
    graphs: Annotated[bool, typer.Option(help="On a GPU, time replays of captured launches.")] = True,
    json: Json = None,
) -> None:
    """Time every kernel after a check of its result, beside the device's ceilings and torch's attentions.

    On a CPU the torch code that runs there is measured, at smaller sizes.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.device(device).type == "cuda"
    if not gpu:
        note("no GPU: this measures the torch code that CPUs use, not the Triton kernels")
    lengths = numbers("--tokens", tokens or ("32768,8192" if gpu else "2048"))
    settings = KernelSettings(
        tokens=tuple(map(int, lengths)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers or (32 if gpu else 2),
        dtype=dtype or ("bfloat16" if gpu else "float32"),
        kernels=names(kernel) if kernel is not None else tuple(KERNELS),
        runs=runs,
        device=device,
        seed=seed,
        baselines=baselines,
        graphs=graphs,
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=errors(), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        report = run(settings, lambda text: progress.update(task, description=text))
    show(report.table(f"Kernels: {report.model}", [n for n in report.rows[0] if n != "runs"]))
    written(report, json)


@dataclass(frozen=True)
class KernelSettings:
    """What to measure; the model's sizes are Llama 3.1 8B's by default.

    ``runs`` are calls per figure. ``baselines``: torch's own attentions as well. ``graphs``: our kernels are
    timed as replays of graphs on a GPU, without the host's part of a launch; next to the milliseconds of a
    baseline a launch is nothing.
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

    ``achieved`` counts the work that the case needs, in ``unit``; ``ceiling`` is a large matrix product or a
    large copy in this run, ``share`` the one over the other. In a baseline's row ``speedup_over`` says how
    many times quicker our kernel did that case, and ``error`` how far its result is from ours; ``failed`` why
    it does not run. RagCacheError if a kernel's result is wrong: no figure is given then.
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
