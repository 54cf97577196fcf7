"""Results of a demo in a file, one line each, from which an interrupted demo continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ragcachekit.files import replace_file


class Work:
    """Results by part and question, in memory and in the file ``path`` (JSON lines; the first is a header).

    A file with another ``header`` was made with other settings: it is begun anew, as is one that cannot be
    read. A last line that was cut off is dropped.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        lines = _lines(path)
        kept = lines[1:] if lines and lines[0] == dict(header) else []
        self.results: dict[tuple[str, str], dict[str, Any]] = {}
        for line in kept:
            self.results[line["part"], line["question"]] = line["result"]
        replace_file(path, "".join(json.dumps(line) + "\n" for line in (dict(header), *kept)))
        self._file = path.open("a", encoding="utf-8")

    def get(self, part: str, question: str) -> dict[str, Any] | None:
        """The result, or None where there is none yet."""
        return self.results.get((part, question))

    def put(self, part: str, question: str, result: dict[str, Any]) -> None:
        """Add a result; it is in the file when this returns."""
        self.results[part, question] = result
        self._file.write(json.dumps({"part": part, "question": question, "result": result}) + "\n")
        self._file.flush()

    def __len__(self) -> int:
        return len(self.results)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of the file; none where it is missing or damaged."""
    try:
        whole = path.read_bytes().rpartition(b"\n")[0]
        found = [json.loads(line) for line in whole.splitlines()]
    except (OSError, ValueError):
        return []
    header, *results = found or [{}]
    named = all(isinstance(line, dict) and {"part", "question", "result"} <= line.keys() for line in results)
    return found if isinstance(header, dict) and named else []
