"""A vector index with its documents: text and metadata by id, filters, persistence, change listeners."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from filelock import FileLock
from numpy.typing import ArrayLike

from ragcachekit.errors import Closed, RetrievalError
from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.distances import Float32, as_rows
from ragcachekit.retrieval.index import DocumentId, SearchResult, VectorIndex, as_ids, load_index, open_index
from ragcachekit.types import positive

_MORE = 4  # how many times k a filtered search asks for first, and more at each further try
_MIN_LOGGED = 1_000  # changes that are logged, however small the index, before it is saved
_LOGGED_SHARE = 10  # and as a part of the index: one in ten


@dataclass(frozen=True)
class Record:
    """A document: its id, text and metadata (JSON values)."""

    id: DocumentId
    text: str
    metadata: dict[str, Any]


class Hit(NamedTuple):
    """A found document and its distance, as :class:`~ragcachekit.retrieval.index.SearchResult` defines it."""

    record: Record
    score: float


Where: TypeAlias = Mapping[str, Any] | Callable[[Record], bool]  # equal metadata values, or a predicate


@dataclass(frozen=True)
class _Head:
    """State of an index as committed: its settings, and a ``version`` that counts changes.

    The vectors of version ``saved`` are in a file (0: none is written yet), the changes since then are
    logged: ``logged`` vectors and removed ids in all.
    """

    kind: str
    metric: str
    options: dict[str, Any]
    embedder: str | None
    dim: int = 0
    version: int = 0
    saved: int = 0
    logged: int = 0


class DocumentIndex:
    """Documents by id with their vectors: add, replace, delete, search with filters, persist, reopen.

    Thread safe. With a ``path``, what a call has acknowledged survives a killed process. After a change by
    another process, the next call reads the index from the disk again, so let one process write. Scores are
    distances: smaller is nearer.

    Parameters
    ----------
    index : str
        One of :func:`~ragcachekit.retrieval.index.index_names`.
    metric : {"cosine", "l2", "ip"}
    path : path, optional
        Folder of the index, made for this user alone if needed. Without it nothing is kept.
    embedder : str, optional
        Name of the embedding model. It is stored, and opening with another one is refused.
    **options
        Options of the index, such as ``links``.

    ValueError for unknown names, or if ``path`` holds another kind, metric, embedder or other options;
    RetrievalError if files are damaged.
    """

    def __init__(
        self,
        index: str = "faiss-flat",
        metric: str = "cosine",
        path: str | os.PathLike[str] | None = None,
        *,
        embedder: str | None = None,
        **options: Any,
    ) -> None:
        wanted = _Head(index, metric, open_index(index, 1, metric, **options).options(), embedder)
        self.path: Path | None = None if path is None else Path(path).expanduser()
        """Folder of the index; None if nothing is kept."""
        self.metric = metric
        self._lock, self._closed = threading.RLock(), False
        self._index: VectorIndex | None = None  # of the version of the head; None before the first add
        self._head = wanted
        self._values: _Memory | JsonStore = _Memory()
        self._writers: AbstractContextManager[object] = nullcontext()
        if self.path is not None:
            self._values = JsonStore(self.path / "documents")
            self._writers = FileLock(self.path / "lock", mode=0o600)
        with self._writers:
            if self._values.get("head") is None:
                left = (
                    () if self.path is None else (*self.path.glob("index-*"), *self.path.glob("*.damaged-*"))
                )
                if left or len(self._values):
                    raise self._lost()
                self._values.put({"head": asdict(wanted)})
            head = self._stored_head()
            _check_same(wanted, head, options, self.path)
            self._load(head)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with self._session():
            return 0 if self._index is None else len(self._index)

    def __contains__(self, one: object) -> bool:
        with self._session():
            return self._index is not None and one in self._index

    @property
    def version(self) -> int:
        """Number of changes so far, those of other processes and earlier runs included."""
        with self._session():
            return self._head.version

    @property
    def ids(self) -> tuple[DocumentId, ...]:
        """Ids of all documents, in the order in which they were added."""
        with self._session():
            return () if self._index is None else self._index.ids

    def add(
        self,
        ids: Sequence[DocumentId],
        embeddings: ArrayLike,
        texts: Sequence[str],
        metadatas: Sequence[Mapping[str, Any]] | None = None,
        *,
        replace: bool = False,
    ) -> None:
        """Add documents: ids, embeddings ``[n, dim]``, texts, and metadata of JSON values.

        ``replace`` updates the documents whose ids are known. The first add sets ``dim``. ValueError for
        known (without ``replace``) or repeated ids, TypeError for what is no JSON value, RetrievalError for
        embeddings that cannot be used, OSError where the disk refuses. An error leaves the index as it was.
        """
        if not len(ids) and not np.size(embeddings):
            return
        width = np.shape(embeddings)[1] if np.ndim(embeddings) == 2 else 1
        rows = as_rows(embeddings, width, self.metric)
        frozen = as_ids(ids, len(rows))
        records = _as_records(frozen, texts, metadatas)
        with self._session(writing=True):
            if self._index is None:
                self._index = open_index(self._head.kind, width, self.metric, **self._head.options)
            if self._index.dim != width:
                raise RetrievalError(f"the index holds embeddings of width {self._index.dim}, not {width}")
            known = tuple(one for one in frozen if one in self._index)
            if known and not replace:
                raise ValueError(f"id {known[0]!r} is in the index already; replace=True updates it")
            self._commit(self._index, known, frozen, rows, records)

    def delete(self, ids: Sequence[DocumentId]) -> int:
        """Delete documents; returns how many of the ids were known."""
        if isinstance(ids, str):
            raise TypeError("ids must be a sequence of ids, not one string")
        with self._session(writing=True):
            index = self._index
            known = () if index is None else tuple(one for one in dict.fromkeys(ids) if one in index)
            if index is not None and known:
                self._commit(index, known, (), np.empty((0, index.dim), np.float32), ())
        return len(known)

    def get(self, ids: Sequence[DocumentId]) -> list[Record]:
        """The documents of these ids, in this order; unknown ids are left out."""
        with self._session():
            found = map(self._record, ids)
            return [record for record in found if record is not None]

    def vectors(self, ids: Sequence[DocumentId]) -> Float32:
        """Stored vectors ``[n, dim]`` (unit vectors under cosine); RetrievalError for an unknown id."""
        with self._session():
            return (self._index or open_index("faiss-flat", 1)).vectors(ids)

    def search(self, embedding: ArrayLike, k: int, where: Where | None = None) -> list[Hit]:
        """The k nearest documents that ``where`` accepts, nearest first; fewer if there are no more.

        A filter that accepts few documents makes the search go through many; a callable is given each
        :class:`Record`, without a lock. RetrievalError for an unusable embedding.
        """
        accepts = _as_predicate(where)
        count = positive("k", k) * (1 if where is None else _MORE)
        while True:
            with self._session():
                if not self._index:
                    return []
                size, hits = len(self._index), self._hits(self._index.search(embedding, count))
            if hits is None:
                continue
            kept = [hit for hit in hits if accepts(hit.record)][:k]
            if len(kept) == k or count >= size:
                return kept
            count *= _MORE

    def search_stages(
        self, embedding: ArrayLike, k: int, stages: int = 4, where: Where | None = None
    ) -> Iterator[list[Hit]]:
        """Provisional results of a search in at most ``stages`` steps; the last is what ``search`` returns.

        See :meth:`ragcachekit.retrieval.index.VectorIndex.search_stages`. No lock is held between the steps;
        a change meanwhile, or a filter that accepts too few, ends them by a whole search.
        """
        accepts, count = _as_predicate(where), positive("k", k) * (1 if where is None else _MORE)
        with self._session():
            if not self._index:
                return iter([list[Hit]()])
            steps, version = self._index.search_stages(embedding, count, stages), self._head.version

        def results() -> Iterator[list[Hit]]:
            kept = list[Hit]()
            while True:
                with self._session():
                    is_same = self._head.version == version
                    step = next(steps, None) if is_same else None
                    hits = None if step is None else self._hits(step)
                if hits is None:
                    break
                yield (kept := [hit for hit in hits if accepts(hit.record)][:k])
            if step is not None or not is_same or (where is not None and len(kept) < k):
                yield self.search(embedding, k, where)

        return results()

    def close(self) -> None:
        """Save the vectors and close the files; may be repeated. Other calls raise Closed from then on."""
        if self._closed:
            return
        with self._session(writing=True):
            if self.path is not None and self._index is not None and self._head.saved != self._head.version:
                self._save(self._head, self._index, {})
            self._closed = True
            self._values.close()

    @contextmanager
    def _session(self, *, writing: bool = False) -> Iterator[None]:
        """The lock, with the changes of other processes applied."""
        with self._writers if writing else nullcontext(), self._lock:
            if self._closed:
                raise Closed("the document index is closed; open it again")
            if not self._is_newest():
                self._load(self._stored_head())
            yield

    def _commit(
        self,
        index: VectorIndex,
        gone: tuple[DocumentId, ...],
        ids: tuple[DocumentId, ...],
        rows: Float32,
        records: Sequence[Record],
    ) -> None:
        """Make one change and store it: all of it, or nothing where the process dies."""
        logged = self._head.logged + len(gone) + len(ids)
        head = replace(self._head, dim=index.dim, version=self._head.version + 1, logged=logged)
        values: dict[str, object] = {_document_key(one): None for one in gone}
        for record in records:
            values[_document_key(record.id)] = {"text": record.text, "metadata": record.metadata}
        try:
            index.remove(gone)
            index.add(ids, rows)
            if self.path is not None and logged > max(_MIN_LOGGED, len(index) // _LOGGED_SHARE):
                self._save(head, index, values)
            else:
                if self.path is not None:
                    vectors = base64.b64encode(rows.tobytes()).decode()
                    values[f"log:{head.version}"] = {"gone": gone, "ids": ids, "rows": vectors}
                self._values.put({**values, "head": asdict(head)})
                self._head = head
        except BaseException:
            if self.path is not None:  # read again at the next call
                self._index, self._head = None, replace(self._head, version=-1)
            raise

    def _save(self, head: _Head, index: VectorIndex, values: Mapping[str, object]) -> None:
        """Write the vectors of ``head`` to a file, instead of the log, and ``values`` with them."""
        assert self.path is not None
        logs = {f"log:{at}": None for at in range(head.saved + 1, head.version + 1)}
        index.save(self.path / f"index-{head.version}")
        head = replace(head, saved=head.version, logged=0)
        self._values.put({**logs, **values, "head": asdict(head)})
        self._head = head
        for file in (*self.path.glob("index-*"), *self.path.glob(".index-*")):  # of killed processes, too
            if file.name != f"index-{head.version}":
                with suppress(OSError):  # Windows keeps files that another process has open
                    file.unlink()

    def _load(self, head: _Head) -> None:
        try:
            self._index = self._read(head)
        except RetrievalError as error:
            head, old = self._stored_head(), head
            if head == old:
                raise RetrievalError(f"{error}. Add the documents again under another path") from error
            self._index = self._read(head)  # another process saved meanwhile
        self._head = head

    def _read(self, head: _Head) -> VectorIndex | None:
        """The vectors of the file and the log; RetrievalError where they are damaged."""
        if self.path is None or not head.version:
            return None
        if head.saved:
            index = load_index(self.path / f"index-{head.saved}")
        else:
            index = open_index(head.kind, head.dim, head.metric, **head.options)
        for at in range(head.saved + 1, head.version + 1):
            if (logged := self._values.get(f"log:{at}")) is None:
                raise RetrievalError(f"{self.path}: logged change {at} is damaged")
            index.remove(logged["gone"])
            rows = np.frombuffer(base64.b64decode(logged["rows"]), np.float32)
            index.add(logged["ids"], rows.reshape(-1, head.dim))
        return index

    def _is_newest(self) -> bool:
        return self.path is None or self._stored_head().version == self._head.version

    def _stored_head(self) -> _Head:
        held = self._values.get("head")
        if held is None:
            raise self._lost()
        return _Head(**held)

    def _lost(self) -> RetrievalError:
        return RetrievalError(
            f"the documents in {self.path} cannot be read; add them again under another path"
        )

    def _record(self, one: DocumentId) -> Record | None:
        held = self._values.get(_document_key(one))
        return None if held is None else Record(one, held["text"], held["metadata"])

    def _hits(self, result: SearchResult) -> list[Hit] | None:
        """The documents of a result without damaged ones; None if another process changed any meanwhile."""
        found = [(self._record(one), score) for one, score in zip(result.ids, result.scores, strict=True)]
        hits = [Hit(record, score) for record, score in found if record is not None]
        return hits if self._is_newest() else None


class _Memory:
    """The part of JsonStore that is used here, over a dict of JSON texts."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def get(self, key: str) -> Any:
        return json.loads(self._texts.get(key, "null"))

    def put(self, values: Mapping[str, object]) -> None:
        self._texts |= {key: json.dumps(value) for key, value in values.items()}
        for key in [key for key, value in values.items() if value is None]:
            del self._texts[key]

    def close(self) -> None:
        self._texts.clear()


def _document_key(one: DocumentId) -> str:
    return f"doc:{json.dumps(one)}"


def _as_records(
    ids: Sequence[DocumentId], texts: Sequence[str], metadatas: Sequence[Mapping[str, Any]] | None
) -> list[Record]:
    """Checked copies of the documents. ValueError for other lengths, TypeError for what is no JSON value."""
    if isinstance(texts, str):
        raise TypeError("texts must be a sequence of texts, not one string")
    given = [{}] * len(ids) if metadatas is None else list(metadatas)
    if len(texts) != len(ids) or len(given) != len(ids):
        raise ValueError(
            f"{len(ids)} ids need as many texts and metadatas, got {len(texts)} and {len(given)}"
        )
    for one in texts:
        if not isinstance(one, str):
            raise TypeError(f"the text of a document must be a str, not {type(one).__name__}")
    try:
        copies = json.loads(json.dumps([dict(one) for one in given], allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"the metadata of a document cannot be stored as JSON: {error}") from error
    if copies != given:  # tuples, keys that are no strings
        raise TypeError("the metadata of a document must hold JSON values: strings as keys, no tuples")
    return [Record(*one) for one in zip(ids, texts, copies, strict=True)]


def _as_predicate(where: Where | None) -> Callable[[Record], bool]:
    """The filter as a function; TypeError for anything else."""
    if callable(where):
        return where
    if where is not None and not isinstance(where, Mapping):
        raise TypeError(f"where must be a mapping or a callable, not {type(where).__name__}")
    wanted = dict(where or {})
    return lambda record: all(
        name in record.metadata and record.metadata[name] == value for name, value in wanted.items()
    )


def _check_same(wanted: _Head, held: _Head, options: dict[str, Any], path: Path | None) -> None:
    """ValueError unless what is on disk was made with what is asked for."""
    made = {"index": held.kind, "metric": held.metric, "embedder": held.embedder, **held.options}
    asked = {"index": wanted.kind, "metric": wanted.metric, "embedder": wanted.embedder}
    for name, value in (asked | {name: wanted.options[name] for name in options}).items():
        if value != made[name] and None not in (value, made[name]):
            raise ValueError(f"{path} was made with {name}={made[name]!r}, not {value!r}; give another path")
