"""What the commands say, and how."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def put(renderable: Any) -> None:
    """Print to the standard output, at least wide enough for a table when piped."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    console.print(renderable)


def show(renderable: Any) -> None:
    """A table of a bench."""
    from ragcachekit.bench.report import show

    show(renderable)


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
        from ragcachekit.bench.checks import INSTALL

        return f"{text}: {INSTALL} brings what the commands need"
    return text


def quiet_loading() -> None:
    """Switch off the bars that transformers shows while it loads weights."""
    from transformers.utils import logging

    logging.disable_progress_bar()
