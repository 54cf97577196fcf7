"""The prompt as text, piece by piece, with how the KV of each piece was had."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text as RichText

from ragcachekit.plan.link_plan import COMPUTED, LinkPlan, chunks_of
from ragcachekit.reports import LinkReport, Report
from ragcachekit.reports.base import folded_html

COLOURS = {"exact": "#b7e4c7", "approximate": "#fff1a8", "recomputed": "#ffcf9e", "computed": "#d6e4ff"}
"""Background of a piece by how its KV was had."""

_CONTEXT = 4  # tokens before a segment that it is decoded after, for its leading space
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class PromptPiece(Report):
    """Tokens of one segment that were treated alike.

    - ``chunk``: Number of the chunk, from 1; 0 for fixed text.
    - ``how``: ``exact``, ``approximate``, ``recomputed`` (cached, and computed again) or ``computed``.
    - ``source``: Tier of its KV, or ``computed``.
    """

    text: str
    tokens: int
    chunk: int
    how: str
    source: str


@dataclass(frozen=True, repr=False)
class PromptView(Report):
    """What :meth:`ragcachekit.RagCache.inspect` returns; notebooks and ``rich.print`` show it in colours."""

    pieces: tuple[PromptPiece, ...]
    report: LinkReport

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens by how their KV was had."""
        counts = Counter[str]()
        for piece in self.pieces:
            counts[piece.how] += piece.tokens
        return {how: counts[how] for how in COLOURS}

    def ansi(self) -> str:
        """The coloured prompt with terminal escapes, to be printed."""
        console = Console(force_terminal=True, color_system="truecolor", width=100)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def __repr__(self) -> str:
        return f"PromptView({self._legend()})"

    def __str__(self) -> str:
        lines = [self._legend()]
        for number, pieces in _by_segment(self.pieces):
            hows = Counter[str]()
            for piece in pieces:
                hows[piece.how] += piece.tokens
            counts = ", ".join(f"{count} {how}" for how, count in hows.items())
            text = "".join(piece.text for piece in pieces)
            lines.append(f"{_label(number):9} {counts} [{pieces[0].source}] {text!r}")
        return "\n".join([*lines, *self._why()])

    def __rich__(self) -> RichText:
        text = RichText()
        for how, count in self.tokens.items():
            text.append(f" {how} {count} ", style=_style(how)).append(" ")
        text.append("\n")
        for number, pieces in _by_segment(self.pieces):
            if number:
                text.append(f"[{number} {pieces[0].source}]", style="bold")
            for piece in pieces:
                text.append(piece.text, style=_style(piece.how))
        return text.append("\n".join(["", *self._why()]), style="italic")

    def _repr_html_(self) -> str:
        legend = " ".join(_span(how, f" {how} {count} ") for how, count in self.tokens.items())
        body = "".join(
            (f"<sup><b>[{number} {html.escape(pieces[0].source)}]</b></sup>" if number else "")
            + "".join(_span(p.how, p.text, f"{_label(number)}: {p.tokens} tokens {p.how}") for p in pieces)
            for number, pieces in _by_segment(self.pieces)
        )
        why = "".join(f"<div><i>{html.escape(line)}</i></div>" for line in self._why())
        shown = f"<div>{legend}</div><div style='white-space:pre-wrap'>{body}</div>{why}"
        return shown + folded_html(str(self.report), self.report)

    def _legend(self) -> str:
        counts = ", ".join(f"{how} {count}" for how, count in self.tokens.items())
        return f"{counts} tokens; {self.report.policy}, encoder {self.report.encoder}"

    def _why(self) -> list[str]:
        fallback = [f"computed in full: {self.report.fallback}"] if self.report.fallback else []
        return [*fallback, *self.report.notes]


def prompt_view(plan: LinkPlan, decode: Decode) -> PromptView:
    """The view of a plan as it ran; ``decode`` keeps special tokens."""
    assert plan.request is not None, "planned from a prompt"
    how, source = ["computed"] * len(plan.token_ids), [COMPUTED] * len(plan.token_ids)
    remaining = iter(plan.placed)
    cached = [use for use in plan.report.uses if use.source != COMPUTED]
    for tier, placed in ((use.source, chunk) for use in cached for chunk in chunks_of(use, remaining)):
        at = slice(placed.start, placed.stop)
        how[at] = ["exact" if placed.is_exact else "approximate"] * placed.tokens
        source[at] = [tier] * placed.tokens
    for row in plan.rows:
        how[row] = "computed" if source[row] == COMPUTED else "recomputed"
    start, chunks, pieces = 0, 0, list[PromptPiece]()
    for segment in plan.request.segments:
        ids = segment.token_ids
        chunks += segment.is_chunk
        runs = [list(run) for _, run in groupby(range(start, start + len(ids)), how.__getitem__)]
        ends = [run[-1] + 1 - start for run in runs]
        texts = _texts(decode, plan.token_ids[max(start - _CONTEXT, 0) : start], ids, ends)
        for run, text in zip(runs, texts, strict=True):
            number = chunks if segment.is_chunk else 0
            pieces.append(PromptPiece(text, len(run), number, how[run[0]], source[run[0]]))
        start += len(ids)
    return PromptView(tuple(pieces), plan.report)


def _texts(decode: Decode, before: Sequence[int], ids: Sequence[int], ends: Sequence[int]) -> Iterator[str]:
    """The texts of the tokens up to each of ``ends``; a character goes where its last token is."""
    done = len(decode(before)) if before else 0
    for end in ends:
        text = decode([*before, *ids[:end]])
        text = text if end == len(ids) else text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield text[done:]
        done = max(done, len(text))


def _by_segment(pieces: Sequence[PromptPiece]) -> Iterator[tuple[int, list[PromptPiece]]]:
    for number, group in groupby(pieces, lambda piece: piece.chunk):
        yield number, list(group)


def _label(number: int) -> str:
    return f"chunk {number}" if number else "text"


def _style(how: str) -> str:
    return f"#1b1b1b on {COLOURS[how]}"


def _span(how: str, text: str, title: str = "") -> str:
    title = f" title='{html.escape(title)}'" if title else ""
    return f"<span{title} style='background:{COLOURS[how]};color:#1b1b1b'>{html.escape(text)}</span>"
