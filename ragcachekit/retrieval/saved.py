"""Cached questions in a folder, for the next process."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.partition import Partition

log = logging.getLogger(__name__)

_PREFIX = "query:"  # of the keys

Document = TypeVar("Document")
ResultId: TypeAlias = str | int
"""What names one document."""


@dataclass(frozen=True, eq=False)
class Held(Generic[Document]):
    """The results of one search for a question, at ``found_at`` of :func:`time.time`: what is cached."""

    found: tuple[tuple[ResultId, Document], ...]
    question: str | None
    found_at: float


class Group(NamedTuple):
    """A partition as later processes name it, and the ``epoch`` of the folder in which it was read."""

    name: str
    epoch: int


class SavedQuestions(Generic[Document]):
    """Questions of a query cache, with their embeddings and documents, by group. Thread safe.

    At most ``capacity``, the oldest leave first. ``write`` makes a JSON value of a document (TypeError or
    ValueError where it cannot: such questions are not kept), and ``read`` the document of it. What is damaged
    or of another program is missing. A folder that cannot be used is named in the log, and nothing is kept.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: int,
        write: Callable[[Document], object],
        read: Callable[[Any], Document],
    ) -> None:
        self._capacity, self._write, self._read = capacity, write, read
        self._lock, self._epoch, self._store = threading.Lock(), 0, None
        try:
            self._store = JsonStore(path)
        except OSError as error:
            log.warning("cached questions are kept in memory only; give another path= (%s)", error)
        self._keys = dict.fromkeys([] if self._store is None else self._store.keys(_PREFIX))
        self._unread = set(self._keys)  # of earlier processes

    @property
    def epoch(self) -> int:
        """Rises when all is dropped."""
        return self._epoch

    def take(self, group: Group) -> list[tuple[Float32, Held[Document]]]:
        """The questions that earlier processes left in a group, once."""
        with self._lock:
            keys = [key for key in self._keys if key in self._unread and key.startswith(_PREFIX + group.name)]
            self._unread.difference_update(keys)
            found = map(self._held, keys)
            return [(embedding, held) for one in found if one is not None for _, embedding, held in [one]]

    def put(self, group: Group, namespace: str, embedding: Any, held: Held[Document]) -> None:
        """Keep a question, unless all was dropped since ``group`` was read."""
        row = np.asarray(embedding, np.float32).tobytes()
        key = f"{_PREFIX}{group.name}:{hashlib.sha256(row).hexdigest()[:16]}"
        try:
            documents = [(one, self._write(document)) for one, document in held.found]
            value = {
                "namespace": namespace,
                "embedding": base64.b64encode(row).decode(),
                "question": held.question,
                "found_at": held.found_at,
                "documents": documents,
            }
            with self._lock:
                if self._store is None or self._epoch != group.epoch:
                    return
                self._keys.pop(key, None)
                old = list(self._keys)[: max(0, len(self._keys) + 1 - self._capacity)]
                self._store.put({**dict.fromkeys(old), key: value})
                self._keys = {one: None for one in (*self._keys, key) if one not in old}
        except (TypeError, ValueError):  # no JSON
            return
        except OSError as error:
            log.warning("a cached question could not be kept: %s", error)

    def drop(self, goes: Callable[[Hashable, Held[Document]], bool]) -> int:
        """Erase what ``goes`` and what cannot be read; returns how many :meth:`take` would have given.

        OSError if the folder cannot be changed.
        """
        with self._lock:
            if self._store is None:
                return 0
            gone = []
            for key in self._store.keys(_PREFIX):
                found = self._held(key)
                if found is None or goes(Partition(found[0], 1), found[2]):
                    gone.append(key)
            self._store.erase(gone)
            unread = len(self._unread.intersection(gone))
            self._unread.difference_update(gone)
            self._keys = {key: None for key in self._keys if key not in gone}
            return unread

    def clear(self) -> None:
        """Erase everything, as an index has changed."""
        with self._lock:
            self._epoch += 1
            if not self._keys or self._store is None:
                return
            self._keys, self._unread = {}, set()
            try:
                self._store.erase(self._store.keys(_PREFIX))
            except OSError:
                log.exception("cached questions of before a change are left; delete %s", self._store.folder)

    def _held(self, key: str) -> tuple[str, Float32, Held[Document]] | None:
        """Namespace, embedding and results of a key; None if they cannot be read."""
        assert self._store is not None
        try:
            value = self._store.get(key)
            found = tuple((one, self._read(document)) for one, document in value["documents"])
            held = Held(found, value["question"], float(value["found_at"]))
            row = np.frombuffer(base64.b64decode(value["embedding"]), np.float32)
            return value["namespace"], row, held
        except Exception:  # damaged, of another program or framework, or a document that is gone
            return None
