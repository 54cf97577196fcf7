"""A vector index with its documents: text and metadata by id, filters, persistence, change listeners."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from filelock import FileLock
from numpy.typing import ArrayLike

from ragcachekit.errors import Closed, RetrievalError
from ragcachekit.search.checks import DocumentId, Float32, as_ids, as_rows
from ragcachekit.search.documents.record import Hit, IndexChange, Record, Where, as_records
from ragcachekit.search.documents.searches import DocumentSearches
from ragcachekit.search.documents.state import IndexState, check_same
from ragcachekit.search.documents.storage import Change, Head, Storage
from ragcachekit.search.registry import open_index


class DocumentIndex:
    """Documents by id with their vectors: add, replace, delete, search with filters, persist, reopen.

    Thread safe. With a ``path``, what a call has acknowledged survives a killed process. Other processes may
    open the same path: their changes are seen at the next call, and writers take turns. Scores are
    distances, as in :class:`~ragcachekit.search.results.SearchResult`: smaller is nearer.

    Parameters
    ----------
    index : str
        One of :func:`~ragcachekit.search.registry.index_names`.
    metric : {"cosine", "l2", "ip"}
    path : path, optional
        Folder of the index, made for this user alone if needed. Without it nothing is kept.
    embedder : str, optional
        Name of the embedding model. It is stored, and opening with another one is refused.
    mmap : bool
        Map the vectors' file instead of reading it, where the index can (see ``load_index``). The first
        change reads it into memory, and saving maps it again.
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
        mmap: bool = False,
        **options: Any,
    ) -> None:
        sample = open_index(index, 1, metric, **options)
        if mmap and not sample.maps:
            raise ValueError(f"{index} cannot map its file; leave mmap out, or use a kind of Faiss's")
        wanted = Head(index, metric, sample.options(), embedder)
        self.metric = metric
        self._lock = threading.RLock()
        self._listeners: list[Callable[[IndexChange], object]] = []
        path = None if path is None else Path(path).expanduser()
        self._storage = Storage(path)
        self._writers: AbstractContextManager[object] = threading.RLock()
        if path is not None:
            self._writers = FileLock(path / "lock", mode=0o600)
            held = self._storage.head()
            if held is not None:
                check_same(wanted, held, options, path)
                wanted = replace_fields(wanted, options=held.options, embedder=held.embedder or embedder)
        self._state = IndexState(wanted, self._storage, mmap)
        self._closed = False
        with self._session():
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with self._session():
            return 0 if self._state.index is None else len(self._state.index)

    def __contains__(self, one: object) -> bool:
        with self._session():
            return self._state.index is not None and one in self._state.index

    @property
    def path(self) -> Path | None:
        """Folder of the index; None if nothing is kept."""
        return self._storage.path

    @property
    def dim(self) -> int | None:
        """Width of the embeddings; None before the first add."""
        with self._session():
            return None if self._state.index is None else self._state.index.dim

    @property
    def version(self) -> int:
        """Number of changes so far, those of other processes and earlier runs included."""
        with self._session():
            return self._state.head.version

    def refresh(self) -> None:
        """Take over what other processes changed, as every other call does; quick without a path."""
        if self.path is not None:
            with self._session():
                pass

    @property
    def ids(self) -> tuple[DocumentId, ...]:
        """Ids of all documents, in the order in which they were added."""
        with self._session():
            return () if self._state.index is None else self._state.index.ids

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
        records = as_records(frozen, texts, metadatas)
        with self._session(writing=True) as changes:
            index = self._state.index
            if index is None:
                index = self._state.new(width)
            if index.dim != width:
                raise RetrievalError(f"the index holds embeddings of width {index.dim}, not {width}")
            known = tuple(one for one in frozen if one in index)
            if known and not replace:
                raise ValueError(f"id {known[0]!r} is in the index already; replace=True updates it")
            changes.append(self._state.commit(index, records, Change(known, frozen, rows)))

    def delete(self, ids: Sequence[DocumentId]) -> int:
        """Delete documents; returns how many of the ids were known."""
        if isinstance(ids, str):
            raise TypeError("ids must be a sequence of ids, not one string")
        with self._session(writing=True) as changes:
            index = self._state.index
            known = () if index is None else tuple(one for one in dict.fromkeys(ids) if one in index)
            if index is not None and known:
                changes.append(self._state.commit(index, (), Change(known)))
        return len(known)

    def get(self, ids: Sequence[DocumentId]) -> list[Record]:
        """The documents of these ids, in this order; unknown ids are left out."""
        with self._session():
            found = map(self._storage.record, ids)
            return [record for record in found if record is not None]

    def vectors(self, ids: Sequence[DocumentId]) -> Float32:
        """Stored vectors ``[n, dim]`` (unit vectors under cosine); RetrievalError for an unknown id."""
        with self._session():
            index = self._state.index
            return (self._state.new(1) if index is None else index).vectors(ids)

    def search(self, embedding: ArrayLike, k: int, where: Where | None = None) -> list[Hit]:
        """The k nearest documents that ``where`` accepts, nearest first; fewer if there are no more.

        A mapping asks for equal metadata values; a callable is given each :class:`Record`. A filter that
        accepts few documents makes the search go through many. RetrievalError for an unusable embedding.
        """
        return DocumentSearches(self._state, self._session, k, where).whole(embedding)

    def search_stages(
        self, embedding: ArrayLike, k: int, where: Where | None = None, stages: int = 4
    ) -> Iterator[list[Hit]]:
        """Provisional results of a search in at most ``stages`` steps; the last is what ``search`` returns.

        See :meth:`VectorIndex.search_stages <ragcachekit.search.base.VectorIndex.search_stages>`. One step
        more follows if too few of the candidates are accepted. No lock is held between the steps.
        """
        return DocumentSearches(self._state, self._session, k, where).staged(embedding, stages)

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
            self._state.save()
            self._closed = True
            self._storage.close()

    @contextmanager
    def _session(self, *, writing: bool = False) -> Iterator[list[IndexChange]]:
        """The lock, with the changes of others applied; listeners are called when it is free again."""
        with ExitStack() as after, self._writers if writing else nullcontext(), self._lock:
            if self._closed:
                raise Closed("the document index is closed; open it again")
            changes = self._state.refresh()
            try:
                yield changes
            finally:
                for change in reversed(changes):
                    for listener in reversed(tuple(self._listeners)):
                        after.callback(listener, change)
