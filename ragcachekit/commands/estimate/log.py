"""A log of questions, one per line: what `ragcachekit estimate` replays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ragcachekit.errors import RagCacheError


@dataclass(frozen=True)
class LoggedQuery:
    """One line, counted from 1.

    ``docs`` is what the user's retriever returned, ``file#number`` of the corpus or the text itself;
    ``time`` are seconds since any fixed moment.
    """

    line: int
    query: str
    docs: tuple[str, ...] | None = None
    time: float | None = None
    answer_tokens: int | None = None


def read_log(path: str | os.PathLike[str]) -> tuple[LoggedQuery, ...]:
    """Read a log, in order of time if every line has one, else in that of the file.

    A line is a JSON object with ``query`` and, if you like, ``docs`` (list of ``file#number`` or texts),
    ``time`` (seconds or ISO 8601) and ``answer_tokens``; other fields are let pass. A line that does not
    begin with ``{`` is a question as it stands; empty lines count for nothing.

    Raises ValueError for a bad line, with its number; for a log without questions; RagCacheError if it
    cannot be read.
    """
    try:
        queries = list(_queries(Path(path).expanduser()))
    except OSError as error:
        raise RagCacheError(
            f"cannot read the log {path}: {error.strerror}; give a file with one question per line (--log)"
        ) from error
    if not queries:
        raise ValueError(f'{path} holds no question; write one per line, or {{"query": "..."}} per line')
    if all(query.time is not None for query in queries):
        queries.sort(key=lambda query: query.time or 0.0)
    return tuple(queries)


def _queries(path: Path) -> Iterator[LoggedQuery]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield _query(number, text)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def _query(number: int, text: str) -> LoggedQuery:
    if not text.startswith("{"):
        return LoggedQuery(number, text)
    try:
        found: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg} at character {error.pos + 1})") from error
    query = found.get("query")
    if not isinstance(query, str) or not query.strip():
        raise ValueError('"query" must be the question, a text that is not empty')
    docs, tokens = found.get("docs"), found.get("answer_tokens")
    if docs is not None and not (
        isinstance(docs, list) and all(isinstance(d, str) and d.strip() for d in docs)
    ):
        raise ValueError('"docs" must be a list of texts or of "file#number"')
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0):
        raise ValueError(f'"answer_tokens" must be a whole number >= 0, not {tokens!r}')
    return LoggedQuery(
        number, query, None if docs is None else tuple(docs), _seconds(found.get("time")), tokens
    )


def _seconds(time: Any) -> float | None:
    if time is None:
        return None
    if isinstance(time, int | float) and not isinstance(time, bool):
        return float(time)
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'"time" must be seconds or ISO 8601 (2026-01-31T12:00:00Z), not {time!r}'
        ) from error
