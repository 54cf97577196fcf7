"""Entries of a query cache on disk: they outlive the process, and processes of one machine share them."""

from __future__ import annotations

import base64
import logging
import math
import time
import uuid
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ragcachekit.config import check_number
from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.partition import LogOnce, Partition
from ragcachekit.retrieval.proximity import ResultId

log = logging.getLogger(__name__)

Document = TypeVar("Document")

_ENTRY, _CHANGED, _INVALIDATED = "entry:", "entries changed", "entries invalidated"
_KINDS = (type(None), bool, int, float, complex, str, bytes, dict, list, tuple, set, frozenset)
_TYPES: dict[str, type] = {kind.__qualname__: kind for kind in _KINDS}


class Held(NamedTuple, Generic[Document]):
    """The results of one search for a question.

    ``k`` is the number asked for and ``radius`` as for :meth:`CachedRetrieval.insert`. ``key`` is that of the
    saved entry, None if there is none. ``expires`` is in seconds of :func:`time.time`.
    """

    found: tuple[tuple[ResultId, Document], ...]
    question: str | None
    k: int | None
    radius: float | None
    key: str | None = None
    expires: float | None = None

    @property
    def known_radius(self) -> float:
        """The radius; infinite if it is not known or if there were fewer than k results."""
        full = self.k is None or len(self.found) >= self.k
        return math.inf if self.radius is None or not full else self.radius

    def refusal(self, k: int | None) -> str | None:
        """Why these results do not answer a question for ``k`` of them now."""
        if self.expires is not None and time.time() >= self.expires:
            return "expired"
        return "fewer results" if k is not None and (self.k or len(self.found)) < k else None


class SavedEntry(NamedTuple, Generic[Document]):
    """An entry as another process or an earlier run stored it, at ``saved_at`` seconds of the epoch."""

    embedding: Float32
    partition: Hashable
    held: Held[Document]
    saved_at: float


class Changes(NamedTuple, Generic[Document]):
    """What others changed: new entries in order, keys of entries that went, and whether any invalidated."""

    added: tuple[SavedEntry[Document], ...] = ()
    gone: frozenset[str] = frozenset()
    invalidated: bool = False


class SavedEntries(Generic[Document]):
    """The entries of one :class:`CachedRetrieval` in a :class:`JsonStore`. Not thread safe by itself.

    Only entries whose partition consists of plain values (numbers, text, tuples, None) can be saved: an
    object of this process means nothing to the next. What cannot be is logged once, and stays in memory.
    Give each configuration (embedder, metric, documents) a store of its own.

    Parameters
    ----------
    store : JsonStore
    to_json, from_json : callable
        A document as a JSON value, and back. An error of either leaves the entry out.
    poll_seconds : float
        Changes of other processes are looked for at most this often. At 0, before every lookup.
    """

    def __init__(
        self,
        store: JsonStore,
        to_json: Callable[[Document], Any],
        from_json: Callable[[Any], Document],
        poll_seconds: float = 1.0,
    ) -> None:
        check_number("poll_seconds", poll_seconds)
        self._store, self._to_json, self._from_json = store, to_json, from_json
        self._poll, self._due = poll_seconds, -math.inf
        self._changed: object = None  # the marks that were seen last
        self._invalidated: object = None
        self._known: set[str] = set()
        self._unread: set[str] = set()
        self._warn = LogOnce(log)

    def changes(self, *, now: bool = False) -> Changes[Document]:
        """What others changed since the last call; nothing before the poll interval, unless ``now``."""
        clock = time.monotonic()
        if not now and clock < self._due:
            return Changes()
        self._due = clock + self._poll
        changed = self._store.get(_CHANGED)  # before the rest: what comes later is seen the next time
        if changed == self._changed and not now:
            return Changes()
        invalidated, keys = self._store.get(_INVALIDATED), self._store.keys(_ENTRY)
        gone = frozenset(self._known.difference(keys))
        self._known -= gone
        self._unread.intersection_update(keys)
        added = tuple([one for one in map(self._read, keys) if one is not None])
        others = invalidated != self._invalidated
        self._changed, self._invalidated = changed, invalidated
        return Changes(added, gone, others)

    def add(self, embedding: ArrayLike, partition: Hashable, held: Held[Document]) -> str | None:
        """Store an entry; its key, or None if it cannot be stored.

        BlockingIOError if others invalidated something since the last :meth:`changes`, which must be applied
        first; OSError if the store fails.
        """
        key = f"{_ENTRY}{uuid.uuid4().hex}"
        values: dict[str, object] = {}
        try:
            values = {key: self._encoded(embedding, partition, held), _CHANGED: uuid.uuid4().hex}
        except Exception as error:  # of the user's codec, too
            self._warn(f"some queries are kept in memory only, as they cannot be saved: {error}")
        if not self._store.put(values, where={_INVALIDATED: self._invalidated}):
            raise BlockingIOError("another process invalidated saved entries")
        if values:
            self._known.add(key)
        return key if values else None

    def announce(self) -> bool:
        """Let all processes refuse what searches of before find; OSError if the store fails.

        False, and nothing done, if another process did so since the last :meth:`changes`.
        """
        mark = uuid.uuid4().hex
        where = {_INVALIDATED: self._invalidated}
        if not self._store.put({_INVALIDATED: mark, _CHANGED: mark}, where=where):
            return False
        self._invalidated = mark
        return True

    def remove(self, keys: Iterable[str]) -> None:
        """Remove entries; OSError if the store fails."""
        here = self._known.intersection(keys)
        if here:
            self._known -= here
            self._unread |= here  # where the store fails: removed at the next invalidation
            self._store.put({**dict.fromkeys(here), _CHANGED: uuid.uuid4().hex})
            self._unread -= here

    def remove_unread(self) -> None:
        """Remove entries that could not be read, as nobody can tell what they hold."""
        self._known |= self._unread
        self.remove(self._unread)
        self._unread.clear()

    def _read(self, key: str) -> SavedEntry[Document] | None:
        if key in self._known or key in self._unread:
            return None
        try:
            entry = self._decoded(key, self._store.get(key))
        except Exception as error:  # damaged, or of the user's codec
            self._unread.add(key)
            self._warn(f"a saved query cannot be read and is left out: {error!r}")
            return None
        self._known.add(key)
        return entry

    def _encoded(self, embedding: ArrayLike, partition: Hashable, held: Held[Document]) -> dict[str, object]:
        return {
            "embedding": base64.b64encode(np.asarray(embedding, "<f4").tobytes()).decode(),
            "partition": to_plain(partition),
            "found": [[one, self._to_json(document)] for one, document in held.found],
            "question": held.question,
            "k": held.k,
            "radius": held.radius,
            "at": time.time(),
        }

    def _decoded(self, key: str, value: Any) -> SavedEntry[Document]:
        found = [(_checked(one, str, int), self._from_json(document)) for one, document in value["found"]]
        question = _checked(value["question"], type(None), str)
        k, radius = _checked(value["k"], type(None), int), _checked(value["radius"], type(None), float, int)
        raw = base64.b64decode(value["embedding"], validate=True)
        embedding = np.frombuffer(raw, "<f4").astype(np.float32)
        held = Held(tuple(found), question, k, radius, key)
        return SavedEntry(embedding, from_plain(value["partition"]), held, float(value["at"]))


def to_plain(value: Any) -> object:
    """A partition as a JSON value; TypeError unless it consists of plain values of plain types."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, type) and _TYPES.get(value.__qualname__) is value:
        return {"type": value.__qualname__}
    for name, kind in (("tuple", tuple), ("partition", Partition), ("frozenset", frozenset)):
        if type(value) is kind:
            return {name: [to_plain(one) for one in value]}
    raise TypeError(f"a {type(value).__name__} in the partition is no plain value")


def from_plain(value: Any) -> Any:
    """The partition of :func:`to_plain`; KeyError, TypeError or ValueError for anything else."""
    if not isinstance(value, dict):
        return _checked(value, type(None), bool, int, float, str)
    ((name, inner),) = value.items()
    if name == "bytes":
        return base64.b64decode(inner, validate=True)
    if name == "type":
        return _TYPES[inner]
    items = [from_plain(one) for one in _checked(inner, list)]
    if name == "partition":
        return Partition(*items)
    return {"tuple": tuple, "frozenset": frozenset}[name](items)


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"a saved {type(value).__name__} where there must be {kinds}")
    return value
