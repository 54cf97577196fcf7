"""Cached questions in a folder, for the next process."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.partition import Partition

log = logging.getLogger(__name__)

_PREFIX = "query:"  # of the keys

Document = TypeVar("Document")
ResultId: TypeAlias = str | int
"""What names one document."""
Group: TypeAlias = tuple[str, int]
"""A partition as later processes name it, and the ``epoch`` of the folder in which it was read."""


@dataclass(eq=False)
class Held(Generic[Document]):
    """The results of one search for a question, at ``found_at`` of :func:`time.time`: what is cached."""

    found: tuple[tuple[ResultId, Document], ...]
    question: str | None
    found_at: float
    used_at: float = 0.0  # the last hit, in this process


class SavedQuestions(Generic[Document]):
    """Questions of a query cache, with their embeddings and documents, by group. Thread safe.

    At most ``capacity``, the oldest leave first. ``write`` makes a JSON value of a document (TypeError or
    ValueError where it cannot: such questions are not kept), and ``read`` the document of it. What is damaged
    or of another program is missing. OSError for a folder that cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: int,
        write: Callable[[Document], object],
        read: Callable[[Any], Document],
    ) -> None:
        self.epoch = 0
        """Rises when an index changes."""
        self._capacity, self._write, self._read = capacity, write, read
        self._lock, self._store = threading.Lock(), JsonStore(path)

    def of(self, group: Group) -> list[tuple[Float32, Held[Document]]]:
        """The embeddings and results of a group."""
        keys = self._store.keys(_PREFIX + group[0])
        return [found[1:] for found in map(self._held, keys) if found]

    def put(self, group: Group, namespace: str, embedding: Any, held: Held[Document]) -> None:
        """Keep a question, unless an index has changed since ``group`` was read."""
        row = np.asarray(embedding, np.float32).tobytes()
        key = f"{_PREFIX}{group[0]}:{hashlib.sha256(row).hexdigest()[:16]}"
        try:
            value = {
                "namespace": namespace,
                "embedding": base64.b64encode(row).decode(),
                "question": held.question,
                "found_at": held.found_at,
                "documents": [(one, self._write(document)) for one, document in held.found],
            }
            with self._lock:
                if self.epoch == group[1]:
                    others = [one for one in self._store.keys(_PREFIX) if one != key]
                    self._store.put({**dict.fromkeys(others[: 1 - self._capacity or None]), key: value})
        except (TypeError, ValueError) as error:
            log.debug("a result that is no JSON is not kept: %s", error)
        except OSError as error:
            log.warning("a cached question could not be kept: %s", error)

    def drop(self, goes: Callable[[Hashable, Held[Document]], bool]) -> None:
        """Delete what ``goes`` and what cannot be read. OSError if the folder cannot be changed."""
        with self._lock:
            held = {key: self._held(key) for key in self._store.keys(_PREFIX)}
            self._store.erase(
                key for key, one in held.items() if one is None or goes(Partition(one[0], 1), one[2])
            )

    def clear(self) -> None:
        """Delete everything, as an index has changed."""
        self.epoch += 1
        try:
            self.drop(lambda *_: True)
        except OSError:
            log.exception("cached questions of before a change of the index are left; delete their folder")

    def _held(self, key: str) -> tuple[str, Float32, Held[Document]] | None:
        """Namespace, embedding and results of a key; None if they cannot be read."""
        try:
            value = self._store.get(key)
            found = tuple((one, self._read(document)) for one, document in value["documents"])
            row = np.frombuffer(base64.b64decode(value["embedding"]), np.float32)
            return value["namespace"], row, Held(found, value["question"], float(value["found_at"]))
        except Exception:  # damaged, of another program or framework, or a document that is gone
            return None
