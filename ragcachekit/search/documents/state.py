"""The vectors of a document index and how they follow what is committed. The caller holds the locks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ragcachekit.errors import RetrievalError
from ragcachekit.search.base import VectorIndex
from ragcachekit.search.documents.record import Hit, IndexChange, Record
from ragcachekit.search.documents.storage import Change, Head, Storage
from ragcachekit.search.registry import load_index, open_index
from ragcachekit.search.results import SearchResult

log = logging.getLogger(__name__)

_LOGGED_AT_LEAST = 1_000  # changes that are logged, however small the index, before it is saved
_LOGGED_SHARE = 10  # and as a part of the index: one in ten


class IndexState:
    """The vector index in memory (None before the first add) and the head that it corresponds to.

    A commit logs the change and its vectors, then applies them; once the log exceeds a tenth of the index,
    it saves the whole index instead. The log stays when :meth:`save` is called, so the vectors of an index
    that never had that many changes can be rebuilt from it.
    """

    def __init__(self, wanted: Head, storage: Storage, mmap: bool) -> None:
        self.index: VectorIndex | None = None
        self.head: Head = wanted
        self._wanted, self._storage, self._mmap = wanted, storage, mmap

    def new(self, dim: int) -> VectorIndex:
        """An empty index of this kind."""
        return open_index(self._wanted.kind, dim, self._wanted.metric, **self._wanted.options)

    def refresh(self) -> list[IndexChange]:
        """Apply what was committed since the last call, and return it. RetrievalError for damaged files."""
        while (head := self._storage.head()) is not None and head.version != self.head.version:
            try:
                return self._follow(head)
            except RetrievalError:
                if self._storage.head() == head:
                    raise
        if head is None and self.head.version:
            raise RetrievalError(f"the documents in {self._storage.path} cannot be read any more")
        self.head = head or self._wanted
        return []

    def commit(self, index: VectorIndex, records: Sequence[Record], change: Change) -> IndexChange:
        """Store one change, with the documents that come, and apply it; the head must be the newest."""
        old = self.head
        logged = old.logged + len(change.gone) + len(change.ids)
        head = replace(old, dim=index.dim, version=old.version + 1, logged=logged)
        large = logged > max(_LOGGED_AT_LEAST, (len(index) + len(change.ids)) // _LOGGED_SHARE)
        try:
            if large and self._storage.path is not None:
                if not old.version:  # so that a process killed now leaves an index that can be opened
                    self._storage.commit_saved(old)
                _apply(index, change)
                index.save(self._storage.index_path(head.version))
                head = replace(head, saved=head.version, base=head.version, logged=0)
                self._storage.commit(head, records, change, log=False)
                self._storage.clean(head)
                self._storage.forget_log(old.base + 1, old.version)
            else:
                self._storage.commit(head, records, change, log=True)
                _apply(index, change)
        except BaseException:
            if self._storage.path is not None:  # read again at the next call
                self.index, self.head = None, self._wanted
            raise
        self.index, self.head = index, head
        if large:
            self._map()
        return _announced(head, change)

    def save(self) -> None:
        """Write the vectors to a file unless it is up to date; the head must be the newest."""
        if self.index is None or self._storage.path is None or self.head.saved == self.head.version:
            return
        self.head = replace(self.head, saved=self.head.version)
        self.index.save(self._storage.index_path(self.head.version))
        self._storage.commit_saved(self.head)

    def hits(self, result: SearchResult) -> list[Hit] | None:
        """The documents of a result; None if another process has changed one of them meanwhile.

        A document that cannot be read is left out.
        """
        found = []
        for one, score in zip(result.ids, result.scores, strict=True):
            record = self._storage.record(one)
            if record is not None and record.version <= self.head.version:
                found.append(Hit(record, score))
            elif self._storage.head() != self.head:
                return None
        return found

    def _follow(self, head: Head) -> list[IndexChange]:
        wanted = self._wanted
        if (head.kind, head.metric, head.options) != (wanted.kind, wanted.metric, wanted.options):
            raise RetrievalError(
                f"{self._storage.path} was made by another process, as {head.kind!r} of {head.metric!r} with "
                f"{head.options}; open it as that or give another path"
            )
        old, index = self.head, self.index
        if index is None or old.version < head.base:
            self.index, self.head = self._load(head), head
            return [IndexChange(head.version, None, None)]
        changes = list(self._logged(old.version, head))
        self.index, self.head = None, self._wanted  # should applying fail, all is read again
        for change in changes:
            _apply(index, change)
        self.index, self.head = index, head
        return [
            _announced(replace(head, version=version), change)
            for version, change in enumerate(changes, old.version + 1)
        ]

    def _load(self, head: Head) -> VectorIndex:
        index, version = None, 0
        if head.saved:
            try:
                index = load_index(self._storage.index_path(head.saved), mmap=self._mmap)
                version = head.saved
            except RetrievalError as error:
                if head.base:
                    message = f"{error}. The log holds the newest vectors only: add the documents again"
                    raise RetrievalError(f"{message} under another path") from error
                log.warning("%s; its vectors are rebuilt from the log", error)
        index = index or self.new(head.dim)
        for change in self._logged(version, head):
            _apply(index, change)
        return index

    def _logged(self, version: int, head: Head) -> Iterator[Change]:
        for at in range(version + 1, head.version + 1):
            change = self._storage.change(at)
            if change is None:
                raise RetrievalError(
                    f"{self._storage.path}: logged change {at} is damaged; "
                    "add the documents again under another path"
                )
            yield change

    def _map(self) -> None:
        if self._mmap and self._storage.path is not None:
            self.index = load_index(self._storage.index_path(self.head.saved), mmap=True)


def check_same(wanted: Head, held: Head, options: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """ValueError unless what is on disk was made with what is asked for."""
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


def _announced(head: Head, change: Change) -> IndexChange:
    rows = change.rows if change.ids else np.empty((0, head.dim), np.float32)
    return IndexChange(head.version, change.gone, rows)


def _apply(index: VectorIndex, change: Change) -> None:
    if change.gone:
        index.remove(change.gone)
    if change.ids:
        index.add(change.ids, change.rows)
