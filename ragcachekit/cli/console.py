"""What the commands say, and how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from ragcachekit.errors import RagCacheError

if TYPE_CHECKING:
    from ragcachekit.commands.bench.report import BenchReport

FAILED = 2
INTERRUPTED = 130


class Commands(TyperGroup):
    """Commands that show what a user can mend as one red line; a bug keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except (RagCacheError, ValueError, ImportError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            errors().print(f"[bold red]{escape(one_line(error))}[/]")
            raise typer.Exit(FAILED) from error


def put(renderable: Any) -> None:
    """Print to the standard output, at least wide enough for a table when piped."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    console.print(renderable)


def show(renderable: Any) -> None:
    """A table of a bench."""
    from ragcachekit.commands.bench.report import show

    show(renderable)


def written(
    report: BenchReport,
    json: Path | None,
    plot: Path | None = None,
    draw: Callable[[BenchReport, Path], object] | None = None,
) -> None:
    """Write the report's JSON and its picture, where they are asked for."""
    if json is not None:
        report.write_json(json)
    if plot is not None and draw is not None:
        draw(report, plot)


def errors() -> Console:
    """The standard error, for notes and errors."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Something worth knowing, beside the output."""
    errors().print(f"[dim]{escape(text)}[/]")


def pairs(rows: dict[str, str]) -> Table:
    """Names and values side by side; empty values are left out."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            grid.add_row(f"[dim]{name}[/]", escape(value))
    return grid


def size(nbytes: int) -> str:
    """Bytes for people, in powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


def counted(number: int, what: str) -> str:
    """As ``1 chunk`` or ``2 chunks``."""
    return f"{number} {what}" + "s" * (number != 1)


def one_line(error: Exception) -> str:
    """What an error says, without line breaks."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        from ragcachekit.commands.checks import INSTALL

        return f"{text}: {INSTALL} brings what the commands need"
    return text


def quiet_loading() -> None:
    """Switch off the bars that transformers shows while it loads weights."""
    from transformers.utils import logging

    logging.disable_progress_bar()
