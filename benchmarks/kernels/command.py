"""kernels: how near the kernels come to what the device can do."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ragcachekit.commands.console import errors, note, show, written
from ragcachekit.commands.options import Device, Json, Seed, names, numbers


def kernels(
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Prompt lengths, with commas between.")
    ] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option("--kv-heads", min=1)] = 8,
    head_dim: Annotated[int, typer.Option("--head-dim", min=16)] = 128,
    layers: Annotated[int | None, typer.Option("--layers", min=1)] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bfloat16 (a GPU's default), float16, float32 (a CPU's).")
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option("--kernels", help="sparse_attention, column_scores, assembly; default: all."),
    ] = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Calls per figure; the median counts.")] = 20,
    device: Device = None,
    seed: Seed = 0,
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="torch's own attentions beside.")
    ] = True,
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="On a GPU, time replays of captured launches.")
    ] = True,
    json: Json = None,
) -> None:
    """Time every kernel after a check of its result, beside the device's ceilings and torch's attentions.

    On a CPU the torch code that runs there is measured, at smaller sizes.
    """
    import torch

    from benchmarks.kernels import run as module
    from benchmarks.kernels.cases import KERNELS

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.device(device).type == "cuda"
    if not gpu:
        note("no GPU: this measures the torch code that CPUs use, not the Triton kernels")
    lengths = numbers("--tokens", tokens or ("32768,8192" if gpu else "2048"))
    settings = module.KernelSettings(
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

        def step(text: str) -> None:
            progress.update(task, description=text)

        report = module.run(settings, step)
    show(report.table(f"Kernels: {report.model}", [n for n in report.rows[0] if n != "runs"]))
    written(report, json)
