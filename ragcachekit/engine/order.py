"""The order of waiting requests: cache-aware (RAGCache section 5.2), fair between namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T")

REFRESHED = 8
"""Estimates renewed per choice; a window of 32 is renewed in four choices."""


@dataclass(eq=False)
class _Entry(Generic[T]):
    """A waiting item: how often later ones overtook it, and the last estimate of its tokens."""

    item: T
    overtaken: int = 0
    cached: int = 0
    computed: int = 1
    renewed: int = -1  # number of the choice

    @property
    def priority(self) -> float:
        return self.cached / self.computed


class CacheAwareOrder(Generic[T]):
    """Waiting items in the order of their turns. Not thread safe.

    Namespaces get equal shares of computed tokens, by start-time fair queueing: the one with the lowest start
    tag is next, and a new one starts at the present virtual time. Within a namespace the item with the most
    cached tokens per computed token is next, among its first ``window + 1``. No item is overtaken more than
    ``window`` times by later ones of its namespace; with 0 the order is that of arrival.

    ``estimate`` returns an item's cached and computed tokens, computed at least 1. ``most_overtaken`` is the
    highest count so far.
    """

    def __init__(self, window: int, estimate: Callable[[T], tuple[int, int]]) -> None:
        self._window, self._estimate = window, estimate
        self._lines: dict[str, list[_Entry[T]]] = {}
        self._starts: dict[str, float] = {}
        self._now = 0.0  # virtual time: the start tag of the last namespace served
        self._choices = self._count = 0
        self.most_overtaken = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in chain.from_iterable(self._lines.values()))

    def add(self, item: T, namespace: str) -> None:
        """Append an item to its namespace's line."""
        if namespace not in self._lines:
            self._lines[namespace] = []
            self._starts[namespace] = max(self._starts.get(namespace, 0.0), self._now)
        self._lines[namespace].append(_Entry(item))
        self._count += 1

    def best(self, ready: Callable[[T], bool] = lambda _: True) -> T | None:
        """The item whose turn it is, which stays; None if there is none.

        Items that are not ``ready`` come after the others, as long as they may be overtaken.
        """
        if not self._lines:
            return None
        line = self._lines[min(self._lines, key=self._starts.__getitem__)]
        if self._count == 1 or line[0].overtaken >= self._window:
            return line[0].item
        near = line[: self._window + 1]
        self._choices += 1
        for entry in sorted(near, key=lambda entry: entry.renewed)[:REFRESHED]:
            self._renew(entry)
        while True:
            ranked = sorted(near, key=lambda entry: -entry.priority)
            best = next((entry for entry in ranked if ready(entry.item)), ranked[0])
            if best.renewed == self._choices:
                return best.item
            self._renew(best)  # what it had cached may be evicted

    def next_ones(self, count: int) -> list[T]:
        """The first ``count`` items of the namespace that is next, in the order of their arrival."""
        if not self._lines:
            return []
        line = self._lines[min(self._lines, key=self._starts.__getitem__)]
        return [entry.item for entry in line[:count]]

    def take(self, item: T, namespace: str) -> None:
        """Remove an item whose turn it is: earlier ones were overtaken, its namespace has had its tokens."""
        line = self._lines[namespace]
        place = next(number for number, entry in enumerate(line) if entry.item is item)
        for earlier in line[:place]:
            earlier.overtaken += 1
        self.most_overtaken = max([self.most_overtaken, *(earlier.overtaken for earlier in line[:place])])
        if line[place].renewed < 0 and self._count > 1:  # of the last one the queue is empty
            self._renew(line[place])
        self._now = max(self._now, self._starts[namespace])
        self._starts[namespace] += line[place].computed
        self._remove(namespace, place)

    def discard(self, item: T, namespace: str) -> bool:
        """Remove an item that has had no turn; False if it does not wait."""
        line = self._lines.get(namespace, [])
        place = next((number for number, entry in enumerate(line) if entry.item is item), None)
        if place is None:
            return False
        self._remove(namespace, place)
        return True

    def _renew(self, entry: _Entry[T]) -> None:
        entry.cached, entry.computed = self._estimate(entry.item)
        entry.renewed = self._choices

    def _remove(self, namespace: str, place: int) -> None:
        line = self._lines[namespace]
        del line[place]
        self._count -= 1
        if not line:
            del self._lines[namespace]
            if not self._lines:  # nobody waits: nobody has had too much
                self._starts, self._now = {}, 0.0
            # Where a namespace that is idle would start now anyway, its tag says nothing.
            elif len(self._starts) > 2 * len(self._lines) + 64:
                kept = self._starts.items()
                self._starts = {n: at for n, at in kept if n in self._lines or at > self._now}
