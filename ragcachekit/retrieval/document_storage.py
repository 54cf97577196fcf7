"""What a document index keeps: documents, a log of the newest changes, and files of the vectors.

The caller holds the locks.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ragcachekit.errors import RetrievalError
from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.index import VectorIndex, load_index, open_index
from ragcachekit.retrieval.index_files import DocumentId

log = logging.getLogger(__name__)

_MIN_LOGGED = 1_000  # changes that are logged, however small the index, before it is saved
_LOGGED_SHARE = 10  # and as a part of the index: one in ten


@dataclass(frozen=True)
class Record:
    """A document: its id, text and metadata (JSON values), and the index version that stored it."""

    id: DocumentId
    text: str
    metadata: dict[str, Any]
    version: int = 0


@dataclass(frozen=True, eq=False)
class IndexChange:
    """What a listener is told about a change.

    ``version`` is the index version after it, ``gone`` the ids that were deleted or replaced, and
    ``embeddings`` ``[n, dim]`` the vectors that came (unit vectors under cosine). Both are None where
    another process made changes that cannot be listed any more: then any document may have changed.
    """

    version: int
    gone: tuple[DocumentId, ...] | None
    embeddings: Float32 | None


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

    def apply(self, index: VectorIndex) -> None:
        """Make the change."""
        if self.gone:
            index.remove(self.gone)
        if self.ids:
            index.add(self.ids, self.rows)

    def announced(self, head: Head) -> IndexChange:
        """What listeners are told."""
        return IndexChange(
            head.version, self.gone, self.rows if self.ids else np.empty((0, head.dim), np.float32)
        )


class Storage:
    """The vector index in memory (None before the first add), its documents, and their copy on disk.

    A commit logs the change and its vectors, then applies them. Once the log exceeds a tenth of the index,
    the whole index is saved instead. The log stays when :meth:`save` is called, so that the vectors of a
    small index can be rebuilt from it. ``head`` is the state that ``index`` corresponds to.
    """

    def __init__(self, path: Path | None, wanted: Head) -> None:
        self.path, self.head = path, wanted
        self.index: VectorIndex | None = None
        self._values = _Memory() if path is None else JsonStore(path / "documents")

    def open(self, check: Callable[[Head], Head]) -> None:
        """Read the folder, after ``check`` of what it was made with; a new one is marked as such."""
        if (held := self._values.get("head")) is None:
            if self.path is not None and (len(self._values) or any(self._remains(self.path))):
                raise self._lost()
            self._values.put({"head": asdict(self.head)})
        else:
            self.head = replace(check(Head(**held)), version=0)
        self.refresh()

    def new(self, dim: int) -> VectorIndex:
        """An empty index of this kind."""
        return open_index(self.head.kind, dim, self.head.metric, **self.head.options)

    def refresh(self) -> list[IndexChange]:
        """Apply what was committed since the last call, and return it. RetrievalError for damaged files."""
        while (head := self._stored_head()).version != self.head.version:
            try:
                return self._follow(head)
            except RetrievalError:
                if self._stored_head() == head:
                    raise
        return []

    def commit(self, index: VectorIndex, records: Sequence[Record], change: Change) -> IndexChange:
        """Store one change, with the documents that come, and apply it; the head must be the newest."""
        old = self.head
        logged = old.logged + len(change.gone) + len(change.ids)
        head = replace(old, dim=index.dim, version=old.version + 1, logged=logged)
        is_large = logged > max(_MIN_LOGGED, (len(index) + len(change.ids)) // _LOGGED_SHARE)
        try:
            if is_large and self.path is not None:
                change.apply(index)
                index.save(self._index_path(head.version))
                head = replace(head, saved=head.version, base=head.version, logged=0)
                self._write(head, records, change, {})
                self._clean(head)
                with suppress(OSError):
                    self._values.delete(f"log:{version}" for version in range(old.base + 1, head.version))
            else:
                logs = {} if self.path is None else {f"log:{head.version}": _as_json(change)}
                self._write(head, records, change, logs)
                change.apply(index)
        except BaseException:
            if self.path is not None:  # read again at the next call
                self.index, self.head = None, replace(old, version=-1)
            raise
        self.index, self.head = index, head
        return change.announced(head)

    def save(self) -> None:
        """Write the vectors to a file unless it is up to date; the head must be the newest."""
        if self.index is not None and self.path is not None and self.head.saved != self.head.version:
            self.head = replace(self.head, saved=self.head.version)
            self.index.save(self._index_path(self.head.version))
            self._values.put({"head": asdict(self.head)})
            self._clean(self.head)

    def record(self, one: DocumentId) -> Record | None:
        """The document; None if it is unknown or damaged."""
        held = self._values.get(_document_key(one))
        return None if held is None else Record(one, **held)

    def is_newest(self) -> bool:
        """Whether nothing was committed since the last refresh."""
        return self._stored_head() == self.head

    def close(self) -> None:
        """Close the database."""
        self._values.close()

    def _stored_head(self) -> Head:
        held = self._values.get("head")
        if held is None:
            raise self._lost()
        return Head(**held)

    def _lost(self) -> RetrievalError:
        return RetrievalError(
            f"the documents in {self.path} cannot be read; add them again under another path"
        )

    def _follow(self, head: Head) -> list[IndexChange]:
        old, index = self.head, self.index
        self.index = None  # should applying fail, all is read again
        if index is None or old.version < head.base:
            self.index, self.head = self._load(head), head
            return [IndexChange(head.version, None, None)]
        changes = list(self._logged(old.version, head))
        for change in changes:
            change.apply(index)
        self.index, self.head = index, head
        versions = range(old.version + 1, head.version + 1)
        return [
            change.announced(replace(head, version=version))
            for version, change in zip(versions, changes, strict=True)
        ]

    def _load(self, head: Head) -> VectorIndex | None:
        index, version = None, 0
        if head.saved:
            try:
                index = load_index(self._index_path(head.saved))
                version = head.saved
            except RetrievalError as error:
                if head.base:
                    message = f"{error}. The log holds the newest vectors only: add the documents again"
                    raise RetrievalError(f"{message} under another path") from error
                log.warning("%s; its vectors are rebuilt from the log", error)
        if index is None and head.version:
            index = self.new(head.dim)
        for change in self._logged(version, head):
            assert index is not None
            change.apply(index)
        return index

    def _logged(self, version: int, head: Head) -> Iterator[Change]:
        for at in range(version + 1, head.version + 1):
            held = self._values.get(f"log:{at}")
            if held is None:
                raise RetrievalError(
                    f"{self.path}: logged change {at} is damaged; add the documents again under another path"
                )
            yield _from_json(held)

    def _write(
        self, head: Head, records: Iterable[Record], change: Change, logs: Mapping[str, object]
    ) -> None:
        """Store a change and its documents at once: all of it, or nothing where the process dies."""
        values: dict[str, object] = {_document_key(one): None for one in {*change.gone} - {*change.ids}}
        for one in records:
            held = {"text": one.text, "metadata": one.metadata, "version": head.version}
            values[_document_key(one.id)] = held
        self._values.put({**values, **logs, "head": asdict(head)})

    def _clean(self, head: Head) -> None:
        """Remove index files other than the saved one, also of processes that died while saving."""
        if self.path is not None:
            kept = self._index_path(head.saved).name
            for file in (*self.path.glob("index-*"), *self.path.glob(".index-*.tmp")):
                if file.name.split(".")[0] != kept:
                    with suppress(OSError):  # Windows keeps files that another process has open
                        file.unlink()

    def _index_path(self, version: int) -> Path:
        assert self.path is not None
        return self.path / f"index-{version}"

    @staticmethod
    def _remains(path: Path) -> Iterator[Path]:
        yield from path.glob("index-*")
        yield from path.glob("documents.damaged-*")


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
        for key, value in values.items():
            self._texts[key] = json.dumps(value)
            if value is None:
                del self._texts[key]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._texts.pop(key, None)

    def close(self) -> None:
        self._texts.clear()


def _as_json(change: Change) -> dict[str, object]:
    rows = base64.b64encode(change.rows.tobytes()).decode()
    return {"gone": change.gone, "ids": change.ids, "rows": rows}


def _from_json(held: Any) -> Change:
    rows = np.frombuffer(base64.b64decode(held["rows"]), np.float32)
    ids = tuple(held["ids"])
    return Change(tuple(held["gone"]), ids, rows.reshape(len(ids), -1) if ids else Change().rows)


def _document_key(one: DocumentId) -> str:
    return f"doc:{json.dumps(one)}"
