"""Last turns of conversations: KV of prompt and answer as linked, exact or approximate."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt

from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.base import Root
from ragcachekit.store.base import Counters, StoreStats
from ragcachekit.store.forgets import ForgottenTexts

MIN_TOKENS = 16
"""Shortest common beginning that counts as a continued conversation."""

_Tokens = npt.NDArray[np.int64]


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
    look-up compares the prompt with every turn: no index, as KV of a turn takes megabytes.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"turns_bytes must be >= 0, got {budget}")
        self.budget = budget
        self.epoch = 0  # number of ``forget`` calls; a turn begun before one is not kept after it
        self._turns: OrderedDict[int, tuple[Turn, _Tokens]] = OrderedDict()
        self._nbytes = 0
        self._number = 0
        self._lock = Lock()
        self._counters = Counters("tree:turns")

    def longest(self, root: Root, token_ids: Sequence[int]) -> Past | None:
        """Turn with the longest beginning in common, the latest of several; None below ``MIN_TOKENS``."""
        if not self.budget:
            return None
        asked = np.array(token_ids, np.int64)
        with self._lock:
            turns = ((n, known) for n, (turn, known) in self._turns.items() if turn.root == root)
            tokens, best = max(((_common(known, asked), n) for n, known in turns), default=(0, 0))
            self._counters.count("hits" if tokens >= MIN_TOKENS else "misses")
            if tokens < MIN_TOKENS:
                return None
            self._turns.move_to_end(best)
            return Past(self._turns[best][0], tokens)

    def keep(self, turn: Turn, epoch: int) -> bool:
        """Keep a turn in place of those that begin it; False if it is too large or of an older epoch."""
        tokens = np.array(turn.token_ids, np.int64)
        with self._lock:
            if epoch != self.epoch:
                return False
            if turn.kv.nbytes > self.budget:
                self._counters.count("failed_writes")
                return False
            for number, (other, known) in list(self._turns.items()):
                if other.root == turn.root and _common(known, tokens) == len(known):
                    self._remove(number)
            while self._nbytes + turn.kv.nbytes > self.budget:
                self._remove(next(iter(self._turns)))
                self._counters.count("evictions")
            self._number += 1
            self._turns[self._number] = (turn, tokens)
            self._nbytes += turn.kv.nbytes
            return True

    def forget(
        self,
        namespace: str,
        chunk_ids: frozenset[str] | None = None,
        texts: ForgottenTexts | None = None,
    ) -> int:
        """Drop turns whose prompt had one of these segments or texts; no ids drop the namespace's."""
        with self._lock:
            self.epoch += 1
            doomed = [
                number
                for number, (turn, _) in self._turns.items()
                if turn.root.namespace == namespace
                and (
                    chunk_ids is None
                    or not chunk_ids.isdisjoint(turn.members)
                    or (texts is not None and texts.begin_in(turn.token_ids))
                )
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


def _common(one: _Tokens, other: _Tokens) -> int:
    """Length of the longest common beginning."""
    least = min(len(one), len(other))
    differ = one[:least] != other[:least]
    return int(differ.argmax()) if differ.any() else least
