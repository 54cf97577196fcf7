"""serve: the model and its caches behind OpenAI's HTTP interface."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import note, quiet_loading


def serve(
    model: opt.Model = "",
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine with --keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="That clients ask for; default: the last part of --model.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys (ragcachekit keys add); each names a tenant.")
    ] = None,
    no_keys: Annotated[bool, typer.Option("--no-keys", help="Let everybody use it, on any --host.")] = False,
    policy: opt.Policy = "auto",
    encoder: opt.Encoder = None,
    namespace: opt.Namespace = "default",
    cache: Annotated[
        str | None,
        typer.Option(help="Folder that keeps KV and contexts on disk; default: both in memory alone."),
    ] = None,
    host_gb: Annotated[float, typer.Option(min=0, help="Budget of the KV in host memory.")] = 4.0,
    disk_gb: opt.DiskGb = None,
    tree_gb: Annotated[
        float, typer.Option(min=0, help="Budget of exact KV of past prompts' beginnings; 0: off.")
    ] = 1.0,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=1, help="Further requests get 503.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for an answer; then 504.")] = 600.0,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Size of a request; else 413.")] = 32,
    public_metrics: Annotated[
        bool, typer.Option("--public-metrics", help="With --keys: let everybody read /metrics.")
    ] = False,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
) -> None:
    """Serve a model over HTTP as OpenAI does: chat and text completions, and stored contexts.

    SIGTERM and Ctrl-C let running answers end. A second one, a second later or more, ends them.
    """
    from ragcachekit.commands import serve as module

    quiet_loading()
    module.run(opt.settings_of(module.ServeSettings, locals()), note)
