"""A question as it was answered side by side, as an SVG that plays at the speed of the run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path

from benchmarks.demo.side_by_side import NAMES, SideBySide

WIDTH, HEIGHT, SIDE = 860, 190, 415
"""Of the picture and of one side of it, in pixels."""

LINE, LETTERS, LINES = 19, 48, 4
"""Height of a line in pixels, letters in a line, and lines of an answer."""

PAUSE_S = 4.0
"""The end is shown for so long before it plays again."""

_HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">
<style>text {{ font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #d4d4d4 }} .name {{ fill: #7fb2ff }}
.status {{ fill: #9bd18b }}</style>
<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#1e1e1e"/>
"""


def write_recording(sides: SideBySide, path: Path) -> None:
    """Write what both sides showed; OSError if ``path`` cannot be written."""
    states = [sides.states(side) for side in (0, 1)]
    seconds = max(state[-1][0] for state in states if state) + PAUSE_S
    parts = [_HEAD, _text(15, 28, sides.question)]
    for side, shown in enumerate(states):
        x = 15 + side * SIDE
        parts.append(
            f'<rect x="{x - 5}" y="42" width="{SIDE - 5}" height="138" rx="5" fill="none" stroke="#555"/>\n'
        )
        parts.append(_text(x + 5, 62, NAMES[side], "name"))
        ends = [*(state[0] for state in shown[1:]), seconds]
        for (start, status, answer), end in zip(shown, ends, strict=True):
            hidden = "" if end == seconds else ' visibility="hidden"'  # where nothing plays, the end is shown
            parts.append(f"<g{hidden}>{_visible(start / seconds, end / seconds, seconds)}\n")
            parts.append(_text(x + 5, 62 + LINE, status, "status"))
            parts += _lines(x + 5, 62 + 2 * LINE, answer)
            parts.append("</g>\n")
    path.write_text("".join([*parts, "</svg>\n"]), encoding="utf-8")


def _visible(start: float, end: float, seconds: float) -> str:
    """Shown from ``start`` to ``end``, shares of the ``seconds`` that it plays."""
    last = ";visible" if end >= 1 else ";visible;hidden"
    times = f"0;{start:.4f}" + ("" if end >= 1 else f";{end:.4f}")
    return (
        f'<animate attributeName="visibility" calcMode="discrete" values="hidden{last}" keyTimes="{times}" '
        f'dur="{seconds:.2f}s" repeatCount="indefinite"/>'
    )


def _lines(x: int, y: int, answer: str) -> Iterator[str]:
    for number, line in enumerate(textwrap.wrap(answer.strip(), LETTERS)[:LINES]):
        yield _text(x, y + number * LINE, line)


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{named}>{escape(text)}</text>\n'
