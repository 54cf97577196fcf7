"""A vector index with its documents: text and metadata by id, filters, persistence, change listeners."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from filelock import FileLock
from numpy.typing import ArrayLike

from ragcachekit.config import positive
from ragcachekit.errors import Closed, RetrievalError
from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.document_storage import Change, Head, IndexChange, Record, Storage
from ragcachekit.retrieval.index import SearchResult, VectorIndex, as_ids, as_rows, open_index
from ragcachekit.retrieval.index_files import DocumentId

_MORE = 4  # how many times k a filtered search asks for first, and more at each further try


class Hit(NamedTuple):
    """A found document and its distance, as :class:`~ragcachekit.retrieval.index.SearchResult` defines it."""

    record: Record
    score: float


Where: TypeAlias = Mapping[str, Any] | Callable[[Record], bool]
"""A filter: metadata values that must be equal, or a predicate."""


class DocumentIndex:
    """Documents by id with their vectors: add, replace, delete, search with filters, persist, reopen.

    Thread safe. With a ``path``, what a call has acknowledged survives a killed process. Other processes may
    open the same path: their changes are seen at the next call, and writers take turns. Scores are
    distances, as in :class:`~ragcachekit.retrieval.index.SearchResult`: smaller is nearer.

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
        Options of the index, such as ``links`` or ``probes``.

    Raises
    ------
    ValueError
        For unknown names, or if ``path`` holds another kind, metric, embedder or other options.
    RetrievalError
        If files are damaged and the vectors cannot be rebuilt.
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
        sample = open_index(index, 1, metric, **options)
        wanted = Head(index, metric, sample.options(), embedder)
        self.metric = metric
        self._lock = threading.RLock()
        self._listeners: list[Callable[[IndexChange], object]] = []
        folder = None if path is None else Path(path).expanduser()
        self._storage, self._closed = Storage(folder, wanted), False
        self._writers: AbstractContextManager[object] = (
            threading.RLock() if folder is None else FileLock(folder / "lock", mode=0o600)
        )
        with self._writers:
            self._storage.open(lambda held: _agreed(wanted, held, options, folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with self._session():
            return 0 if self._storage.index is None else len(self._storage.index)

    def __contains__(self, one: object) -> bool:
        with self._session():
            return self._storage.index is not None and one in self._storage.index

    @property
    def path(self) -> Path | None:
        """Folder of the index; None if nothing is kept."""
        return self._storage.path

    @property
    def dim(self) -> int | None:
        """Width of the embeddings; None before the first add."""
        with self._session():
            return None if self._storage.index is None else self._storage.index.dim

    @property
    def version(self) -> int:
        """Number of changes so far, those of other processes and earlier runs included."""
        with self._session():
            return self._storage.head.version

    def refresh(self) -> None:
        """Take over what other processes changed, as every other call does; quick without a path."""
        if self.path is not None:
            with self._session():
                pass

    @property
    def ids(self) -> tuple[DocumentId, ...]:
        """Ids of all documents, in the order in which they were added."""
        with self._session():
            return () if self._storage.index is None else self._storage.index.ids

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
        width = np.shape(embeddings)[1] if np.ndim(embeddings) == 2 else self.dim or 1
        rows = as_rows(embeddings, width, self.metric)
        frozen = as_ids(ids, len(rows))
        records = _as_records(frozen, texts, metadatas)
        with self._session(writing=True) as changes:
            index = self._storage.index
            if index is None:
                index = self._storage.new(width)
            if index.dim != width:
                raise RetrievalError(f"the index holds embeddings of width {index.dim}, not {width}")
            known = tuple(one for one in frozen if one in index)
            if known and not replace:
                raise ValueError(f"id {known[0]!r} is in the index already; replace=True updates it")
            changes.append(self._storage.commit(index, records, Change(known, frozen, rows)))

    def delete(self, ids: Sequence[DocumentId]) -> int:
        """Delete documents; returns how many of the ids were known."""
        if isinstance(ids, str):
            raise TypeError("ids must be a sequence of ids, not one string")
        with self._session(writing=True) as changes:
            index = self._storage.index
            known = () if index is None else tuple(one for one in dict.fromkeys(ids) if one in index)
            if index is not None and known:
                changes.append(self._storage.commit(index, (), Change(known)))
        return len(known)

    def get(self, ids: Sequence[DocumentId]) -> list[Record]:
        """The documents of these ids, in this order; unknown ids are left out."""
        with self._session():
            found = map(self._storage.record, ids)
            return [record for record in found if record is not None]

    def vectors(self, ids: Sequence[DocumentId]) -> Float32:
        """Stored vectors ``[n, dim]`` (unit vectors under cosine); RetrievalError for an unknown id."""
        with self._session():
            index = self._storage.index
            return (self._storage.new(1) if index is None else index).vectors(ids)

    def search(self, embedding: ArrayLike, k: int, where: Where | None = None) -> list[Hit]:
        """The k nearest documents that ``where`` accepts, nearest first; fewer if there are no more.

        A mapping asks for equal metadata values; a callable is given each :class:`Record`. A filter that
        accepts few documents makes the search go through many. RetrievalError for an unusable embedding.
        """
        return _Search(self._storage, self._session, k, where).whole(embedding)

    def search_stages(
        self, embedding: ArrayLike, k: int, where: Where | None = None, stages: int = 4
    ) -> Iterator[list[Hit]]:
        """Provisional results of a search in at most ``stages`` steps; the last is what ``search`` returns.

        See :meth:`ragcachekit.retrieval.index.VectorIndex.search_stages`. One step more follows if too few of
        the candidates are accepted. No lock is held between the steps.
        """
        return _Search(self._storage, self._session, k, where).staged(embedding, stages)

    def on_change(self, listener: Callable[[IndexChange], object]) -> Callable[[], None]:
        """Call ``listener`` with an :class:`IndexChange` after each change; returns what ends that.

        It is called in the thread that made the change or first saw another process's, when searches
        already see it, and without a lock. Its errors reach the caller, and the change stays.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def close(self) -> None:
        """Save the vectors and close the files; may be repeated. Other calls raise Closed from then on."""
        if self._closed:
            return
        with self._session(writing=True):
            self._storage.save()
            self._closed = True
            self._storage.close()

    @contextmanager
    def _session(self, *, writing: bool = False) -> Iterator[list[IndexChange]]:
        """The lock, with the changes of others applied; listeners are called when it is free again."""
        with ExitStack() as after, self._writers if writing else nullcontext(), self._lock:
            if self._closed:
                raise Closed("the document index is closed; open it again")
            changes = self._storage.refresh()
            try:
                yield changes
            finally:
                for change in reversed(changes):
                    for listener in reversed(tuple(self._listeners)):
                        after.callback(listener, change)


class _Search:
    """One search: ``k`` documents that ``where`` accepts.

    ``session`` gives the lock of the index with the newest state; filters are called outside of it.
    """

    def __init__(
        self,
        storage: Storage,
        session: Callable[[], AbstractContextManager[object]],
        k: int,
        where: Where | None,
    ) -> None:
        self._storage, self._session, self._k = storage, session, positive("k", k)
        self._accepts: Callable[[Record], bool] = _as_predicate({} if where is None else where)
        self._count = self._k if where is None else _MORE * self._k

    def whole(self, embedding: ArrayLike) -> list[Hit]:
        """The nearest accepted documents."""
        while True:
            with self._session():
                index = self._storage.index
                if index is None or not len(index):
                    return []
                size, hits = len(index), self._hits(index.search(embedding, self._count))
            if hits is None:
                continue
            kept = self._kept(hits)
            if len(kept) == self._k or self._count >= size:
                return kept
            self._count *= _MORE

    def staged(self, embedding: ArrayLike, stages: int) -> Iterator[list[Hit]]:
        """Provisional results; the last is what :meth:`whole` returns at some moment of the call."""
        with self._session():
            index = self._storage.index
            if index is None or not len(index):
                return iter([list[Hit]()])
            return self._steps(embedding, index, index.search_stages(embedding, self._count, stages))

    def _steps(
        self, embedding: ArrayLike, index: VectorIndex, steps: Iterator[SearchResult]
    ) -> Iterator[list[Hit]]:
        kept, size = list[Hit](), 0
        while True:
            hits = None
            with self._session():
                if self._storage.index is index and len(index):
                    result = next(steps, None)
                    if result is None:
                        break
                    size, hits = len(index), self._hits(result)
            if hits is None:  # another process changed what was found, or nothing is left
                yield self.whole(embedding)
                return
            kept = self._kept(hits)
            yield kept
        if len(kept) < self._k and self._count < size:
            self._count *= _MORE
            yield self.whole(embedding)

    def _kept(self, hits: list[Hit]) -> list[Hit]:
        return [hit for hit in hits if self._accepts(hit.record)][: self._k]

    def _hits(self, result: SearchResult) -> list[Hit] | None:
        """The documents of a result; None if another process has changed one of them meanwhile.

        A document that cannot be read is left out.
        """
        found = []
        for one, score in zip(result.ids, result.scores, strict=True):
            record = self._storage.record(one)
            if record is not None and record.version <= self._storage.head.version:
                found.append(Hit(record, score))
            elif not self._storage.is_newest():
                return None
        return found


def _as_records(
    ids: Sequence[DocumentId], texts: Sequence[str], metadatas: Sequence[Mapping[str, Any]] | None
) -> tuple[Record, ...]:
    """Checked copies of the documents. ValueError for other lengths, TypeError for what is no JSON value."""
    if isinstance(texts, str):
        raise TypeError("texts must be a sequence of texts, not one string")
    if len(texts) != len(ids) or (metadatas is not None and len(metadatas) != len(ids)):
        given = len(texts) if metadatas is None else f"{len(texts)} and {len(metadatas)}"
        raise ValueError(f"{len(ids)} ids need as many texts and metadatas, got {given}")
    return tuple(map(_as_record, ids, texts, repeat({}) if metadatas is None else metadatas))


def _as_predicate(where: Where) -> Callable[[Record], bool]:
    """The filter as a function; TypeError for anything else."""
    if callable(where):
        return where
    if not isinstance(where, Mapping):
        raise TypeError(f"where must be a mapping or a callable, not {type(where).__name__}")
    wanted = dict(where)
    return lambda record: all(
        name in record.metadata and record.metadata[name] == value for name, value in wanted.items()
    )


def _as_record(one: DocumentId, text: str, metadata: Mapping[str, Any]) -> Record:
    if not isinstance(text, str):
        raise TypeError(f"the text of document {one!r} must be a str, not {type(text).__name__}")
    if not isinstance(metadata, Mapping):
        raise TypeError(f"the metadata of document {one!r} must be a mapping, not {type(metadata).__name__}")
    given = dict(metadata)
    try:
        copy = json.loads(json.dumps(given, allow_nan=False))
    except RecursionError as error:
        raise ValueError(f"the metadata of document {one!r} is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise type(error)(f"the metadata of document {one!r} cannot be stored as JSON: {error}") from error
    if copy != given:  # tuples, keys that are no strings
        raise TypeError(f"the metadata of document {one!r} must hold JSON values: {copy!r} comes back")
    return Record(one, text, copy)


def _agreed(wanted: Head, held: Head, options: dict[str, Any], path: Path | None) -> Head:
    """What is on disk; ValueError unless it was made with what is asked for."""
    if held.kind != wanted.kind or held.metric != wanted.metric:
        raise ValueError(
            f"{path} holds a {held.kind!r} index of metric {held.metric!r}, not {wanted.kind!r} of "
            f"{wanted.metric!r}; open it as it is or give another path"
        )
    for name in options:
        if held.options[name] != wanted.options[name]:
            raise ValueError(f"{path} was made with {name}={held.options[name]}, not {wanted.options[name]}")
    if None not in (held.embedder, wanted.embedder) and held.embedder != wanted.embedder:
        raise ValueError(
            f"{path} holds embeddings of {held.embedder!r}, not {wanted.embedder!r}; give another path"
        )
    return replace(held, embedder=held.embedder or wanted.embedder)
