"""Commands that prove the library's claims: they run in a checkout of the repository."""

from __future__ import annotations

import typer

from ragcachekit.errors import RagCacheError

TOP = ("demo",)
BENCHES = ("eviction", "planner", "store", "kernels", "budget")


def moved(name: str) -> RagCacheError:
    """The error of a command that went to the benchmarks."""
    return RagCacheError(
        f"this is not part of the package any more: run `python -m benchmarks {name}` in a checkout of the "
        "repository"
    )


def add(app: typer.Typer, names: tuple[str, ...]) -> None:
    """Add hidden commands that say where they went, whatever their arguments."""
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name in names:
        app.command(name, hidden=True, context_settings=anything)(_tell)


def _tell(context: typer.Context) -> None:
    """Say where the command went."""
    raise moved(str(context.info_name))
