"""The entries of a cached retrieval: embeddings in a query cache, results beside them, all of it saved."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.query.base import Entry, LogOnce, ResultId
from ragcachekit.query.lookups import Held
from ragcachekit.query.metrics import Float32
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.saved import SavedEntries

log = logging.getLogger(__name__)

Document = TypeVar("Document")

_ROUNDING = 1e-5  # of an index that computes in float32
_ROWS = 4096  # keys that are widened to float64 at a time


class Entries(Generic[Document]):
    """Results by the number that the query cache stores for them. Not thread safe."""

    def __init__(self, cache: ProximityCache, saved: SavedEntries[Document] | None) -> None:
        self.cache, self.held = cache, dict[ResultId, Held[Document]]()
        self._saved = saved
        self._numbers = itertools.count()
        self._warn = LogOnce(log)

    def insert(
        self,
        embedding: ArrayLike,
        partition: Hashable,
        held: Held[Document],
        question: str | None = None,
        replaces: ResultId | None = None,
    ) -> None:
        """Insert one, also on disk, in the place of ``replaces``. Raises as :meth:`SavedEntries.add`."""
        if self._saved is not None:
            held = held._replace(key=self._saved.add(embedding, partition, held, question))
        self._put(embedding, partition, held)
        if replaces in self.held:
            self.drop(lambda number, _: number == replaces)

    def drop(self, goes: Callable[[ResultId, Held[Document]], bool]) -> int:
        """Drop entries by their number and results; returns how many. OSError if the store fails."""
        return self.drop_entries(lambda entry, held: goes(entry.ids[0], held))

    def drop_entries(self, goes: Callable[[Entry, Held[Document]], bool]) -> int:
        """Drop entries by what the query cache knows, and results; returns how many. OSError as above."""
        return self._left(self.cache.forget(lambda entry: goes(entry, self.held[entry.ids[0]])))

    def take_over(self, *, now: bool = False) -> bool:
        """Apply what other processes changed; whether one of them invalidated anything.

        If so, entries that are not saved go, since those processes cannot name them.
        """
        if self._saved is None:
            return False
        changes = self._saved.changes(now=now)
        if changes.gone or changes.invalidated:
            without = {None} if changes.invalidated else set[str | None]()
            self.drop(lambda _, held: held.key in changes.gone or held.key in without)
        for entry in changes.added:
            expires = None if self.cache.ttl is None else entry.saved_at + self.cache.ttl
            try:
                self._put(entry.embedding, entry.partition, entry.held._replace(expires=expires))
            except (RetrievalError, TypeError) as error:
                self._warn(f"a saved query is left out: {error}")
        return changes.invalidated

    def begin_invalidation(self) -> None:
        """Let other processes refuse what their searches of before find, and see all their entries.

        OSError if the store fails.
        """
        while self._saved is not None:
            try:
                self._saved.announce()
            except BlockingIOError:
                self.take_over(now=True)
                continue
            self.take_over(now=True)
            self._saved.remove_unread()
            break

    def reached(self, added: NDArray[np.float64]) -> set[ResultId]:
        """Numbers of the entries into whose results one of ``added`` ``[m, dim]`` may belong."""
        entries = self.cache.entries()
        numbers = [entry.ids[0] for entry, _ in entries]
        if not entries or not added.size or added.ndim != 2 or added.shape[1] != entries[0][1].size:
            return set(numbers)
        radii = [self.held[number].known_radius for number in numbers]
        within = _within([key for _, key in entries], radii, added, self.cache.metric)
        return {number for number, near in zip(numbers, within, strict=True) if near}

    def _put(self, embedding: ArrayLike, partition: Hashable, held: Held[Document]) -> None:
        number = next(self._numbers)
        self.held[number] = held
        try:
            left = self.cache.insert(embedding, (number,), partition=partition)
        except Exception:
            self._unsave([self.held.pop(number)])
            raise
        self._left(left)

    def _left(self, left: Sequence[Entry]) -> int:
        self._unsave([self.held.pop(entry.ids[0]) for entry in left])
        return len(left)

    def _unsave(self, gone: Iterable[Held[Document]]) -> None:
        if self._saved is not None:
            self._saved.remove([held.key for held in gone if held.key is not None])


def _within(
    keys: Sequence[Float32], radii: Sequence[float], added: NDArray[np.float64], metric: str
) -> list[bool]:
    """For each key ``[dim]``, whether one of the rows of ``added`` lies within its radius.

    Rounding counts as within, and so do zero vectors and numbers that are not finite.
    """
    out: list[bool] = []
    norms = np.einsum("ij,ij->i", added, added)
    for start in range(0, len(keys), _ROWS):
        rows = np.stack(keys[start : start + _ROWS]).astype(np.float64)
        limits = np.asarray(radii[start : start + _ROWS])[:, None]
        with np.errstate(all="ignore"):
            dots, squared = rows @ added.T, np.einsum("ij,ij->i", rows, rows)[:, None]
            if metric == "l2":
                far = squared + norms - 2 * dots > limits**2 + _ROUNDING * (squared + norms)
            elif metric == "cosine":
                far = 1 - dots / np.sqrt(squared * norms) > limits + _ROUNDING
            else:
                far = -dots > limits + _ROUNDING * np.sqrt(squared * norms)
        out += (~far.all(axis=1)).tolist()
    return out
