"""Where a document index keeps its documents and the changes since its vectors were last saved."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ragcachekit.errors import RetrievalError
from ragcachekit.json_store import JsonStore
from ragcachekit.search.checks import DocumentId, Float32
from ragcachekit.search.documents.record import Record


@dataclass(frozen=True)
class Head:
    """State of a document index as committed.

    ``version`` counts changes. The vectors of version ``saved`` are in a file (0: none is written yet), and
    the changes after version ``base`` are logged: ``logged`` vectors and removed ids in all.
    """

    kind: str
    metric: str
    options: dict[str, Any]
    embedder: str | None
    dim: int = 0
    version: int = 0
    saved: int = 0
    base: int = 0
    logged: int = 0


@dataclass(frozen=True, eq=False)
class Change:
    """One change: ids that go (deleted or replaced), then ids that come with their vectors ``[n, dim]``."""

    gone: tuple[DocumentId, ...] = ()
    ids: tuple[DocumentId, ...] = ()
    rows: Float32 = field(default_factory=lambda: np.empty((0, 0), np.float32))


class Storage:
    """Head, documents and change log: in a folder that processes share, or in memory without a path."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._values = _Memory() if path is None else JsonStore(path / "documents")

    def head(self) -> Head | None:
        """The committed state, None before the first change; RetrievalError where it was lost."""
        held = self._values.get("head")
        if held is None and (len(self._values) or any(self._remains())):
            held = self._values.get("head")  # another process may have made its first change in between
            if held is None:
                raise RetrievalError(
                    f"the documents in {self.path} cannot be read; add them again under another path"
                )
        return None if held is None else Head(**held)

    def record(self, one: DocumentId) -> Record | None:
        """The document; None if it is unknown or damaged."""
        held = self._values.get(_document_key(one))
        return None if held is None else Record(one, **held)

    def change(self, version: int) -> Change | None:
        """The logged change that led to this version; None if it is not logged or damaged."""
        held = self._values.get(f"log:{version}")
        if held is None:
            return None
        rows = np.frombuffer(base64.b64decode(held["rows"]), np.float32)
        ids = tuple(held["ids"])
        return Change(tuple(held["gone"]), ids, rows.reshape(len(ids), -1) if ids else Change().rows)

    def commit(self, head: Head, records: Iterable[Record], change: Change, *, log: bool) -> None:
        """Store one change and its documents at once: all of it, or nothing where the process dies."""
        left = set(change.gone) - set(change.ids)
        values: dict[str, object] = {_document_key(one): None for one in left}
        values |= {
            _document_key(one.id): {"text": one.text, "metadata": one.metadata, "version": head.version}
            for one in records
        }
        if log and self.path is not None:
            rows = base64.b64encode(change.rows.tobytes()).decode()
            values[f"log:{head.version}"] = {"gone": change.gone, "ids": change.ids, "rows": rows}
        self._values.put({**values, "head": asdict(head)})
        with suppress(OSError):
            self._values.delete(map(_document_key, left))

    def commit_saved(self, head: Head) -> None:
        """Store a head whose vectors were written to :meth:`index_path`, and remove older files."""
        self._values.put({"head": asdict(head)})
        self.clean(head)

    def clean(self, head: Head) -> None:
        """Remove index files other than the saved one, also of processes that died while saving."""
        if self.path is None:
            return
        kept = self.index_path(head.saved).name
        for file in (*self.path.glob("index-*"), *self.path.glob(".index-*.tmp")):
            if file.name.split(".")[0] != kept:
                with suppress(OSError):  # Windows keeps files that another process has open
                    file.unlink()

    def forget_log(self, first: int, last: int) -> None:
        """Remove the logged changes of these versions, both included."""
        with suppress(OSError):
            self._values.delete(f"log:{version}" for version in range(first, last + 1))

    def index_path(self, version: int) -> Path:
        """Path of the vectors as of a version."""
        assert self.path is not None
        return self.path / f"index-{version}"

    def close(self) -> None:
        """Close the database."""
        self._values.close()

    def _remains(self) -> Iterator[Path]:
        if self.path is not None:
            yield from self.path.glob("index-*")
            yield from self.path.glob("documents.damaged-*")


class _Memory:
    """The part of JsonStore that is used here, over a dict of JSON texts."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def get(self, key: str) -> Any:
        text = self._texts.get(key)
        return None if text is None else json.loads(text)

    def put(self, values: Mapping[str, object]) -> None:
        self._texts |= {key: json.dumps(value) for key, value in values.items()}

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._texts.pop(key, None)

    def close(self) -> None:
        self._texts.clear()


def _document_key(one: DocumentId) -> str:
    return f"doc:{json.dumps(one)}"
