"""How a document's text differs from what a prompt made of it."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

PIECE = 16  # characters that are in a prompt by no accident
PRESENT = 0.3  # share of the characters in such pieces; below it the document is not there

_WORD = re.compile(r"\s*\S*")
_ESCAPED: dict[str, Callable[[str], str]] = {
    "printed as Python": lambda text: repr(text)[1:-1],
    "JSON-escaped": lambda text: json.dumps(text)[1:-1],
}
_FOLDED: dict[str, Callable[[str], str]] = {
    "whitespace": lambda text: " ".join(text.split()),
    "Unicode form": lambda text: unicodedata.normalize("NFKC", text),
    "upper or lower case": str.casefold,
}


class Difference(NamedTuple):
    """Kind of difference, and the characters around the first one in the document and in the prompt."""

    why: str
    document: str = ""
    prompt: str = ""


class _Piece(NamedTuple):
    """``text[start:end]`` is in the prompt at ``at``."""

    start: int
    end: int
    at: int


def difference(text: str, prompt: str) -> Difference:
    """What ``prompt`` made of ``text``, which it does not hold verbatim."""
    text = text.strip()
    kind = _whole_change(text, prompt)
    pieces = _pieces(text, prompt)
    if not pieces:
        return Difference(kind or "absent")
    first, last = pieces[0], pieces[-1]
    # Around the end of the first piece, or the start of the document if it begins later.
    end, at = (0, first.at - first.start) if first.start else (first.end, first.at + first.end)
    shown = text[max(end - 12, 0) : end + 24], prompt[max(at - 12, 0) : max(at, 0) + 24]
    if kind is None:
        if sum(piece.end - piece.start for piece in pieces) < PRESENT * len(text):
            return Difference("absent")
        ends, starts = (0, *(piece.end for piece in pieces)), (*(piece.start for piece in pieces), len(text))
        lost = any(text[end:start].strip() for end, start in zip(ends, starts, strict=True))
        if len(pieces) > 1:
            kind = "altered" if lost else "cut into pieces"
        elif first.start == 0:
            kind = "truncated"
        else:
            kind = "beginning missing" if last.end == len(text) else "both ends missing"
    return Difference(kind, *shown)


def _whole_change(text: str, prompt: str) -> str | None:
    """The one change that explains everything, if there is one."""
    for why, escape in _ESCAPED.items():
        if escape(text) != text and escape(text) in prompt:
            return why
    if text in html.unescape(prompt):
        return "HTML-escaped"
    for why, fold in _FOLDED.items():
        if fold(text) in fold(prompt):
            return why
    return None


def _pieces(text: str, prompt: str) -> list[_Piece]:
    """Parts of ``text`` that are in ``prompt``, from left to right, the longest first part each."""
    found, start = list[_Piece](), 0
    while len(text) - start >= PIECE:
        if text[start : start + PIECE] in prompt:
            # Every beginning of a part that is in the prompt is in it, too.
            lengths = range(1, len(text) - start + 1)
            end = start + bisect_left(lengths, True, key=lambda n: text[start : start + n] not in prompt)
            found.append(_Piece(start, end, prompt.index(text[start:end])))
            start = end
        elif (word := _WORD.match(text, start)) is not None:
            start = word.end()
    return found
