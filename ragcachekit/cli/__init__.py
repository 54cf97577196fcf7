"""The command line. What is heavy is imported inside the commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

import ragcachekit
from ragcachekit.cli import (
    cache,
    calibrate,
    corpus,
    estimate,
    eviction,
    fidelity,
    kernels,
    measure,
    planner,
    store_bench,
)
from ragcachekit.cli.console import errors, one_line
from ragcachekit.errors import RagCacheError

FAILED = 2


class _Commands(TyperGroup):
    """Shows what a user can mend as one red line; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (RagCacheError, ValueError, ImportError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            errors().print(f"[bold red]{escape(one_line(error))}[/]")
            raise typer.Exit(FAILED) from error


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ragcachekit {ragcachekit.__version__}")
        raise typer.Exit


def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Options of all commands."""


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Retrieval-augmented generation on your own model without paying twice for retrieval and prefill.",
)
app.callback()(root)
for command in (measure.demo, corpus.ask, corpus.precompute, calibrate.calibrate, measure.check_model):
    app.command()(command)
app.command()(estimate.estimate)

_bench = typer.Typer(no_args_is_help=True, help="Measure on this machine; tables, JSON and plots.")
_bench.command()(measure.ttft)
_bench.command()(measure.query_cache)
_bench.command()(fidelity.fidelity)
_bench.command()(calibrate.budget)
_bench.command()(eviction.eviction)
_bench.command()(store_bench.store)
_bench.command()(planner.planner)
_bench.command()(kernels.kernels)
app.add_typer(_bench, name="bench")

_cache = typer.Typer(no_args_is_help=True, help="What lies in a cache folder; check, mend or empty it.")
_cache.command()(cache.stats)
_cache.command()(cache.verify)
_cache.command()(cache.repair)
_cache.command()(cache.clear)
app.add_typer(_cache, name="cache")


def main() -> None:
    """The console script."""
    app()
