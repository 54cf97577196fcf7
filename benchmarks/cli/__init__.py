"""The command line of what proves the library's claims: ``python -m benchmarks``."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.cli import (
    demo,
    eviction,
    families,
    kernels,
    near_misses,
    planner,
    query_cache,
    serve,
    store,
    world,
)
from ragcachekit.commands.console import Commands


def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Options of all commands."""


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="What RagCacheKit claims, measured: a demo, the sample world and its reader, simulations, kernels.",
)
app.callback()(root)
for command in (
    *(demo.demo, world.fidelity, world.budget, query_cache.query_cache_lookup, near_misses.near_misses),
    *(query_cache.query_cache, serve.serve),
    *(eviction.eviction, planner.planner, store.store, kernels.kernels, families.families),
):
    app.command()(command)


def main() -> None:
    """Run the command that is named."""
    app(prog_name="python -m benchmarks")
