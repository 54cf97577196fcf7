"""One question on the terminal, answered twice: without the cache on the left, with it on the right."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

NAMES = "transformers", "with RagCacheKit"
TICK_S = 0.5  # between two states of a side that waits


class SideBySide:
    """Two answers as they grow, each with the seconds to its first token; without ``live`` nothing is shown.

    The left one begins at once, the right one at ``begin_right``.
    """

    def __init__(self, question: str, *, live: bool) -> None:
        self._question, self._texts = question, ["", ""]
        self._begun: list[float | None] = [None, None]
        self._first: list[float | None] = [None, None]
        self._pushed: list[tuple[float, int, str]] = []
        self._live = Live(get_renderable=self.rendered, console=Console(highlight=False)) if live else None

    def __enter__(self) -> Self:
        self._begun[0] = time.perf_counter()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def left(self, text: str) -> None:
        """The answer of the bare model so far."""
        self._push(0, text)

    def begin_right(self) -> None:
        """The left answer is complete; the other one is asked for."""
        self._begun[1] = time.perf_counter()

    def right(self, text: str) -> None:
        """The answer with the cache so far."""
        self._push(1, text)

    @property
    def question(self) -> str:
        """What was asked."""
        return self._question

    def states(self, side: int) -> list[tuple[float, str, str]]:
        """What a side (0 is left) showed: from how many seconds on, its status and its answer so far."""
        start, begun = self._begun[0], self._begun[side]
        if start is None or begun is None:
            return []
        pushed = [(when, text) for when, own, text in self._pushed if own == side]
        end = pushed[0][0] if pushed else begun
        ticks = [begun + TICK_S * n for n in range(int((end - begun) / TICK_S) + 1)]
        waiting = [(when - start, f"waiting ... {when - begun:.1f} s", "") for when in ticks]
        done = f"first token after {end - begun:.1f} s"
        return [*waiting, *((when - start, done, text) for when, text in pushed)]

    def _push(self, side: int, text: str) -> None:
        now = time.perf_counter()
        if self._first[side] is None:
            self._first[side] = now
        self._texts[side] = text
        self._pushed.append((now, side, text))

    def rendered(self) -> RenderableType:
        """Both answers as they are now, in panels."""
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*(self._panel(side) for side in (0, 1)))
        return Panel(grid, title=escape(self._question), title_align="left", border_style="dim")

    def _panel(self, side: int) -> Panel:
        begun, first = self._begun[side], self._first[side]
        seconds = "" if begun is None else f"{(first or time.perf_counter()) - begun:.1f} s"
        done = f"first token after [bold]{seconds}[/]" if first else f"waiting ... {seconds}" if begun else ""
        return Panel(
            escape(self._texts[side].strip()), title=NAMES[side], subtitle=done, title_align="left", height=5
        )
