"""The last turns of conversations: prompt and answer as they were linked, exact or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import StoreStats
from ragcachekit.store.counters import Counters
from ragcachekit.tree.base import Root

LEAST_TOKENS = 16
"""A shorter common beginning is no conversation that goes on."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn's rows.

    Attributes
    ----------
    root : Root
    token_ids : tuple of int
        Prompt and answer, as far as there is KV of them.
    kv : ChunkKV
        Of these tokens, from position 0 on, turned as they stand.
    exact : int
        So many rows from the start are what an ordinary prefill computes; those behind are approximate,
        and stay so however often they are reused.
    members : frozenset of str
        Ids of the prompt's segments; ``forget`` of any of them drops the turn.
    """

    root: Root
    token_ids: tuple[int, ...]
    kv: ChunkKV
    exact: int
    members: frozenset[str]

    def rows(self, start: int, stop: int) -> ChunkKV:
        """A view of some of its rows."""
        return ChunkKV(
            tuple(k[:, start:stop] for k in self.kv.keys),
            tuple(v[:, start:stop] for v in self.kv.values),
            start,
        )


@dataclass(frozen=True, eq=False)
class Past:
    """A turn that a prompt goes on from: their first ``tokens`` tokens are the same."""

    turn: Turn
    tokens: int


class Turns:
    """Least recently used turns leave first, within a byte budget. Thread safe.

    Never a part of the tree: a turn may hold approximate rows.

    Parameters
    ----------
    budget : int
        Bytes of all turns together; 0 keeps none.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"turns_bytes must be >= 0, got {budget}")
        self.budget = budget
        self._turns: OrderedDict[int, tuple[Turn, NDArray[np.int64]]] = OrderedDict()
        self._nbytes = 0
        self._number = 0
        self._epoch = 0
        self._lock = Lock()
        self._counters = Counters("tree:turns")

    @property
    def epoch(self) -> int:
        """Grows with every ``forget``; a turn that began before one is not kept after it."""
        return self._epoch

    def longest(self, root: Root, token_ids: Sequence[int]) -> Past | None:
        """The turn with the longest beginning in common, or None."""
        if not self.budget:
            return None
        asked = np.asarray(token_ids, dtype=np.int64)
        with self._lock:
            common = {
                number: _common(known, asked)
                for number, (turn, known) in self._turns.items()
                if turn.root == root
            }
            best = max(common, key=lambda number: (common[number], number), default=None)
            if best is None or common[best] < LEAST_TOKENS:
                self._counters.count("misses")
                return None
            self._counters.count("hits")
            self._turns.move_to_end(best)
            return Past(self._turns[best][0], common[best])

    def keep(self, turn: Turn, epoch: int) -> bool:
        """Keep a turn in place of the ones that it goes on from; False if it is too large or too late."""
        known = np.asarray(turn.token_ids, dtype=np.int64)
        with self._lock:
            if epoch != self._epoch:
                return False
            if turn.kv.nbytes > self.budget:
                self._counters.count("failed_writes")
                return False
            for number, (other, ids) in list(self._turns.items()):
                if other.root == turn.root and _common(ids, known) == len(ids):
                    self._remove(number)
            while self._nbytes + turn.kv.nbytes > self.budget:
                self._remove(next(iter(self._turns)))
                self._counters.count("evictions")
            self._number += 1
            self._turns[self._number] = (turn, known)
            self._nbytes += turn.kv.nbytes
            return True

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop turns whose prompt had one of these segments; ``None`` drops the namespace's."""
        with self._lock:
            self._epoch += 1
            doomed = [
                number
                for number, (turn, _) in self._turns.items()
                if turn.root.namespace == namespace
                and (chunk_ids is None or not chunk_ids.isdisjoint(turn.members))
            ]
            for number in doomed:
                self._remove(number)
            return len(doomed)

    def stats(self) -> tuple[StoreStats, ...]:
        """One record; none where no turns are kept."""
        if not self.budget:
            return ()
        with self._lock:
            entries, nbytes = len(self._turns), self._nbytes
        return (self._counters.stats(entries=entries, nbytes=nbytes, budget=self.budget),)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._turns.clear()
            self._nbytes = 0

    def _remove(self, number: int) -> None:
        self._nbytes -= self._turns.pop(number)[0].kv.nbytes


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Length of the longest common beginning."""
    least = min(len(one), len(other))
    differ = np.flatnonzero(one[:least] != other[:least])
    return int(differ[0]) if len(differ) else least
