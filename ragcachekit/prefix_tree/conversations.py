"""Last turns of conversations: KV of prompt and answer as linked, exact or approximate."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.base import Root
from ragcachekit.store.base import StoreStats
from ragcachekit.store.counters import Counters

LEAST_TOKENS = 16
"""Shortest common beginning that counts as a continued conversation."""

_ITEM = array("q").itemsize


@dataclass(frozen=True, eq=False)
class Turn:
    """KV of one turn. Rows from ``exact`` on are approximate, and stay so when reused."""

    root: Root
    token_ids: tuple[int, ...]  # prompt and answer, as far as there is KV of them
    kv: ChunkKV  # of these tokens, rotated from position 0 on
    exact: int  # rows from the start that equal those of an ordinary prefill
    members: frozenset[str]  # ids of the prompt's segments; ``forget`` of any of them drops the turn

    def rows(self, start: int, stop: int) -> ChunkKV:
        """View of some of its rows."""
        return ChunkKV(
            tuple(k[:, start:stop] for k in self.kv.keys),
            tuple(v[:, start:stop] for v in self.kv.values),
            start,
        )


@dataclass(frozen=True, eq=False)
class Past:
    """A turn whose first ``tokens`` tokens a prompt repeats."""

    turn: Turn
    tokens: int


class Turns:
    """Turns within a byte budget, evicted least recently used first. Thread safe.

    Separate from the tree, as a turn may hold approximate rows. ``budget`` is in bytes; 0 keeps none. A
    look-up compares the prompt with every turn, some 2 µs each: no index, as KV of a turn takes megabytes.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"turns_bytes must be >= 0, got {budget}")
        self.budget = budget
        self._turns: OrderedDict[int, tuple[Turn, bytes]] = OrderedDict()  # with its packed token ids
        self._nbytes = 0
        self._number = 0
        self._epoch = 0
        self._lock = Lock()
        self._counters = Counters("tree:turns")

    @property
    def epoch(self) -> int:
        """Number of ``forget`` calls; a turn begun before one is not kept after it."""
        return self._epoch

    def longest(self, root: Root, token_ids: Sequence[int]) -> Past | None:
        """Turn with the longest beginning in common, the latest of several; None below ``LEAST_TOKENS``."""
        if not self.budget:
            return None
        asked = _packed(token_ids)
        with self._lock:
            best, tokens = 0, LEAST_TOKENS
            shared, one_more = asked[: tokens * _ITEM], asked[: (tokens + 1) * _ITEM]
            for number, (turn, known) in self._turns.items() if len(token_ids) >= tokens else ():
                if not known.startswith(shared) or turn.root != root:
                    continue
                if len(one_more) == len(shared) or not known.startswith(one_more):
                    best = max(best, number)
                    continue
                best, tokens = number, _common(known, asked)
                shared, one_more = asked[: tokens * _ITEM], asked[: (tokens + 1) * _ITEM]
            self._counters.count("hits" if best else "misses")
            if not best:
                return None
            self._turns.move_to_end(best)
            return Past(self._turns[best][0], tokens)

    def keep(self, turn: Turn, epoch: int) -> bool:
        """Keep a turn in place of those that begin it; False if it is too large or of an older epoch."""
        packed = _packed(turn.token_ids)
        with self._lock:
            if epoch != self._epoch:
                return False
            if turn.kv.nbytes > self.budget:
                self._counters.count("failed_writes")
                return False
            for number, (other, known) in list(self._turns.items()):
                if other.root == turn.root and packed.startswith(known):
                    self._remove(number)
            while self._nbytes + turn.kv.nbytes > self.budget:
                self._remove(next(iter(self._turns)))
                self._counters.count("evictions")
            self._number += 1
            self._turns[self._number] = (turn, packed)
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
        """Drop all turns."""
        with self._lock:
            self._turns.clear()
            self._nbytes = 0

    def _remove(self, number: int) -> None:
        self._nbytes -= self._turns.pop(number)[0].kv.nbytes


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Length of the longest common beginning, in tokens."""
    least = min(len(one), len(other)) // _ITEM
    differ = np.frombuffer(one, np.int64, least) != np.frombuffer(other, np.int64, least)
    first = int(differ.argmax()) if least else 0
    return first if least and differ[first] else least
