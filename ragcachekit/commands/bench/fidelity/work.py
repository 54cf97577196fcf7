"""The work file of a fidelity run: one line per question and way, so that an interrupted run goes on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ragcachekit.commands.bench.fidelity.engines import Way
from ragcachekit.commands.bench.fidelity.measure import Measurement
from ragcachekit.errors import RagCacheError

_FORMAT = 1
_NOT_OURS = "{} is no work file of this bench; give another one"
_SAME = {
    "fingerprint": "another model",
    "seed": "another seed",
    "questions": "other questions",
    "max_new_tokens": "another length of answers",
    "version": "another version of this package",
}


@dataclass(frozen=True)
class WorkHeader:
    """What must be the same for results to go together: model, questions in order, length of answers, ...

    ``neighbours`` says where ``similar:n`` gets them; ``version`` is that of the package.
    """

    fingerprint: str
    seed: int
    questions: str
    max_new_tokens: int
    neighbours: str
    version: str


class Work:
    """Results so far; kept in a file if there is one.

    Parameters
    ----------
    header : WorkHeader
    path : path, optional
        Continued where it exists. A last line that was cut off is dropped.

    Raises RagCacheError if the file belongs to another run or is none of ours.
    """

    def __init__(self, header: WorkHeader, path: str | os.PathLike[str] | None = None) -> None:
        self._found: dict[tuple[int, Way], Measurement] = {}
        self._path = Path(path) if path is not None else None
        self._file = None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._read(header, self._path):
                self._path.write_text(_line({"fidelity": _FORMAT, **asdict(header)}), encoding="utf-8")
            self._file = self._path.open("a", encoding="utf-8")

    def __len__(self) -> int:
        return len(self._found)

    def get(self, question: int, way: Way) -> Measurement | None:
        """The result of a question, if there is one."""
        return self._found.get((question, way))

    def put(self, question: int, way: Way, found: Measurement) -> None:
        """Keep a result."""
        self._found[question, way] = found
        if self._file is not None:
            self._file.write(_line({"question": question, **asdict(way), **asdict(found)}))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, header: WorkHeader, path: Path) -> bool:
        """Take over what a file holds; False if it holds nothing yet."""
        raw = path.read_bytes() if path.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        if not whole:
            if not raw.startswith(b'{"fidelity"'[: len(raw)]):
                raise RagCacheError(_NOT_OURS.format(path))
            return False
        lines = whole.decode("utf-8", errors="replace").splitlines()
        _check(header, lines[0], path)
        for number, line in enumerate(lines[1:], 2):
            self._take(line, f"{path}, line {number}")
        if len(whole) < len(raw):
            os.truncate(path, len(whole))
        return True

    def _take(self, line: str, where: str) -> None:
        try:
            found = json.loads(line)
            way = Way(found["policy"], found["encoder"])
            values = {field.name: found[field.name] for field in fields(Measurement)}
            values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
            self._found[int(found["question"]), way] = Measurement(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise RagCacheError(f"{where} is damaged; delete the file and start again") from error


def _line(found: dict[str, Any]) -> str:
    return json.dumps(found) + "\n"


def _check(header: WorkHeader, line: str, path: Path) -> None:
    try:
        found = json.loads(line)
        known = isinstance(found, dict) and found.get("fidelity") == _FORMAT
    except ValueError:
        known = False
    if not known:
        raise RagCacheError(_NOT_OURS.format(path))
    for name, what in _SAME.items():
        if found.get(name) != getattr(header, name):
            raise RagCacheError(
                f"{path} belongs to a run with {what}; delete it or give another file for this one"
            )
