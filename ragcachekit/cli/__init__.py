"""The command line. Heavy imports stand inside the commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import ragcachekit
from ragcachekit.cli import bench_serve, cache, corpus, doctor, keys, measure, quality, serve
from ragcachekit.cli.console import Commands


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ragcachekit {ragcachekit.__version__}")
        raise typer.Exit


def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Options of all commands."""


def _add(group: typer.Typer, *commands: Callable[..., None]) -> None:
    for command in commands:
        group.command()(command)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Retrieval-augmented generation on your own model without paying twice for retrieval and prefill.",
)
app.callback()(root)
_bench = typer.Typer(no_args_is_help=True, help="Measure on this machine; tables, JSON and plots.")
_cache = typer.Typer(no_args_is_help=True, help="What lies in a cache folder; check, mend or empty it.")
_keys = typer.Typer(no_args_is_help=True, help="API keys of the server.")

_add(app, corpus.ask, corpus.precompute, quality.calibrate, corpus.estimate, measure.check_model)
_add(app, serve.serve, doctor.doctor, measure.sample_model)
_add(_bench, measure.ttft, measure.query_cache, quality.fidelity, bench_serve.serve)
_add(_cache, cache.stats, cache.verify, cache.repair, cache.clear)
_add(_keys, keys.add, keys.remove)

app.add_typer(_bench, name="bench")
app.add_typer(_cache, name="cache")
app.add_typer(_keys, name="keys")


def main() -> None:
    """The console script."""
    app()
