"""The log of questions that `ragcachekit estimate` replays."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcachekit.errors import RagCacheError


@dataclass(frozen=True)
class LoggedQuestion:
    """One question; ``chunks`` are what the user's retriever returned, ``file#number`` or the text itself."""

    line: int
    question: str
    chunks: tuple[str, ...] | None = None


def read_log(path: str | os.PathLike[str]) -> tuple[LoggedQuestion, ...]:
    """Read a log with one question per line, as plain text or as JSON.

    A JSON object has ``question`` and optionally ``chunks``, a list of ``file#number`` or texts; other fields
    are ignored, and so are empty lines. So a file of ``--questions`` is a log too.

    Raises ValueError for a bad line, with its number, or a log without questions; RagCacheError if the file
    cannot be read.
    """
    try:
        lines = Path(path).expanduser().read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise RagCacheError(
            f"cannot read the log {path}: {error.strerror}; give a file with one question per line (--log)"
        ) from error
    queries = []
    for number, line in enumerate(lines, start=1):
        try:
            if text := line.decode().strip():
                queries.append(_query(number, text))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not queries:
        raise ValueError(f'{path} holds no question; write one per line, or {{"question": "..."}} per line')
    return tuple(queries)


def _query(number: int, text: str) -> LoggedQuestion:
    if not text.startswith("{"):
        return LoggedQuestion(number, text)
    try:
        found: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg} at character {error.pos + 1})") from error
    question, chunks = found.get("question"), found.get("chunks")
    if not isinstance(question, str) or not question.strip():
        raise ValueError('"question" must be the question, a text that is not empty')
    if chunks is None:
        return LoggedQuestion(number, question)
    if not isinstance(chunks, list) or not all(isinstance(chunk, str) and chunk.strip() for chunk in chunks):
        raise ValueError('"chunks" must be a list of texts or of "file#number"')
    return LoggedQuestion(number, question, tuple(chunks))
