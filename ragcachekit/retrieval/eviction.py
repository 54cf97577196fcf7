"""Which entry leaves a full query cache: one class per order."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)


class EvictionOrder(Protocol[T]):
    """Items in the order in which they leave; iterating begins with the next one."""

    def add(self, item: T) -> None:
        """Take up an item that is not among them."""

    def touch(self, item: T) -> None:
        """Note a hit."""

    def remove(self, item: T) -> None:
        """Take out an item, whether it is evicted or not."""

    def victim(self) -> T:
        """The item that leaves next; there must be one."""

    def __iter__(self) -> Iterator[T]: ...


class Fifo(Generic[T]):
    """Oldest insert first; a hit changes nothing (Proximity, section 3.2.2). All in O(1)."""

    def __init__(self) -> None:
        self._items: OrderedDict[T, None] = OrderedDict()

    def add(self, item: T) -> None:
        self._items[item] = None

    def touch(self, item: T) -> None:
        pass

    def remove(self, item: T) -> None:
        del self._items[item]

    def victim(self) -> T:
        return next(iter(self._items))

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)


class Lru(Fifo[T]):
    """Least recently inserted or hit first. All in O(1)."""

    def touch(self, item: T) -> None:
        self._items.move_to_end(item)


class Lfu(Generic[T]):
    """Fewest hits since the insert first; among equals the oldest insert. O(log n) amortised."""

    def __init__(self) -> None:
        self._ranks: dict[T, tuple[int, int]] = {}  # hits and number of the insert
        self._heap: list[tuple[int, int, T]] = []  # with ranks of the past among them
        self._inserts = 0

    def add(self, item: T) -> None:
        self._inserts += 1
        self._push(item, 0, self._inserts)

    def touch(self, item: T) -> None:
        hits, number = self._ranks[item]
        self._push(item, hits + 1, number)

    def remove(self, item: T) -> None:
        del self._ranks[item]

    def victim(self) -> T:
        while True:
            hits, number, item = self._heap[0]
            if self._ranks.get(item) == (hits, number):
                return item
            heapq.heappop(self._heap)

    def __iter__(self) -> Iterator[T]:
        return iter(sorted(self._ranks, key=self._ranks.__getitem__))

    def _push(self, item: T, hits: int, number: int) -> None:
        self._ranks[item] = hits, number
        heapq.heappush(self._heap, (hits, number, item))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(*rank, one) for one, rank in self._ranks.items()]
            heapq.heapify(self._heap)


_ORDERS: dict[str, Callable[[], EvictionOrder[Any]]] = {"fifo": Fifo, "lru": Lru, "lfu": Lfu}


def make_order(name: str) -> EvictionOrder[Any]:
    """An empty order; ValueError with the known names for an unknown one."""
    if name not in _ORDERS:
        raise ValueError(f"unknown eviction {name!r}; known: {', '.join(_ORDERS)}")
    return _ORDERS[name]()
