"""The entries of one tier in the order of eviction: heaps over a policy's numbers."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from ragcachekit.store.eviction import HIT, MISS, Access, EvictionPolicy, Record

K = TypeVar("K", bound=Hashable)

_REMEMBERED = 4096  # evicted entries at least; where a tier holds more, as many as it holds


class Ranking(Generic[K]):
    """The entries of a tier, their sizes and their order of eviction; O(log n) per operation, amortised.

    Not thread safe. A held entry (in use by a request, or with children in a tree) keeps its place but is
    skipped. An entry's record survives its eviction for a while (RAGCache section 5.1 counts retrievals of
    documents, cached or not), but not its removal. ``groups`` enables :meth:`nbytes_of`, and ``lowest`` and
    ``evict`` of one group.
    """

    def __init__(self, policy: EvictionPolicy, *, groups: bool = False) -> None:
        self._policy = policy
        self._groups = groups
        self._live: dict[K, Record] = {}
        self._past: OrderedDict[K, Record] = OrderedDict()
        self._now = 0
        self._sizes: defaultdict[str, int] = defaultdict(int)
        self._members: Counter[str] = Counter()
        self._heaps: defaultdict[str | None, list[tuple[float, int, K]]] = defaultdict(list)
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: K) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[K]:
        return iter(self._live)

    def nbytes_of(self, group: str) -> int:
        """Bytes of one group's entries."""
        return self._sizes.get(group, 0)

    def size(self, item: K) -> int:
        """Bytes of an entry; KeyError if it is not here."""
        return self._live[item].nbytes

    def add(
        self, item: K, nbytes: int, group: str = "", access: Access = MISS, *, hold: bool = False
    ) -> None:
        """Add an entry, or set its size; counts as an access. ``hold``: as :meth:`hold` after it."""
        record = self._live.get(item)
        if record is None:
            record = self._past.pop(item, None) or Record()
            self._live[item] = record
        else:
            self._uncount(record)
        record.nbytes, record.group = nbytes, group
        self._count(record)
        record.holds += hold
        self._accessed(item, record, access)

    def touch(self, item: K, access: Access = HIT) -> None:
        """Count an access to an entry that is here."""
        record = self._live.get(item)
        if record is not None:
            self._accessed(item, record, access)

    def note(self, item: K, access: Access) -> None:
        """Count an access to an entry, also while it is not here."""
        if item in self._live:
            self.touch(item, access)
            return
        record = self._past.pop(item, None) or Record()
        self._count_access(record, access)
        self._remember(item, record)

    def remove(self, item: K) -> None:
        """Remove an entry and its record."""
        self._past.pop(item, None)
        record = self._live.pop(item, None)
        if record is not None:
            self._uncount(record)

    def hold(self, item: K) -> None:
        """Keep an entry from eviction until it is released as often as it was held."""
        record = self._live.get(item)
        if record is not None:
            record.holds += 1

    def release(self, item: K) -> None:
        """Undo one :meth:`hold`; nothing if the entry has been removed since."""
        record = self._live.get(item)
        if record is None or not record.holds:
            return
        record.holds -= 1
        if not record.holds:
            self._push(item, record)

    def lowest(self, group: str | None = None) -> K | None:
        """The next entry to be evicted (of one group); None if all are held."""
        heap = self._heaps.get(group, [])
        while heap:
            if self._is_evictable(heap[0]):
                return heap[0][2]
            heapq.heappop(heap)  # outdated, or held: then its release puts it back
        return None

    def evict(self, group: str | None = None) -> K | None:
        """Remove and return the next entry to be evicted; None if all are held."""
        item = self.lowest(group)
        if item is None:
            return None
        heapq.heappop(self._heaps[group])  # it is the first there
        record = self._live.pop(item)
        self._uncount(record)
        self._policy.evicted(record)
        self._remember(item, record)
        return item

    def clear(self) -> None:
        """Remove all entries and records."""
        for table in (self._live, self._past, self._sizes, self._members, self._heaps):
            table.clear()
        self.nbytes = 0

    def _remember(self, item: K, record: Record) -> None:
        self._past[item] = record
        while len(self._past) > max(_REMEMBERED, len(self._live)):
            self._past.popitem(last=False)

    def _count_access(self, record: Record, access: Access) -> None:
        self._now += 1
        self._policy.accessed(record, access, self._now)
        record.at = self._now

    def _accessed(self, item: K, record: Record, access: Access) -> None:
        self._count_access(record, access)
        if not record.holds:  # else its release does it, once for all uses until then
            self._push(item, record)

    def _push(self, item: K, record: Record) -> None:
        # Numbers of accesses are unique, so only an item and itself are ever compared.
        entry = (record.priority, record.at, item)
        self._push_to(None, entry, len(self._live))
        if self._groups:
            self._push_to(record.group, entry, self._members[record.group])

    def _push_to(self, group: str | None, entry: tuple[float, int, K], live: int) -> None:
        heap = self._heaps[group]
        heapq.heappush(heap, entry)
        if len(heap) > 2 * live + 64:
            self._rebuild(group)

    def _is_evictable(self, entry: tuple[float, int, K]) -> bool:
        """Whether an entry of a heap is up to date and not held."""
        priority, at, item = entry
        record = self._live.get(item)
        return record is not None and not record.holds and record.at == at and record.priority == priority

    def _rebuild(self, group: str | None) -> None:
        """Drop what is outdated, held or there twice."""
        heap = list({entry for entry in self._heaps[group] if self._is_evictable(entry)})
        heapq.heapify(heap)
        self._heaps[group] = heap

    def _count(self, record: Record) -> None:
        self.nbytes += record.nbytes
        if self._groups:
            self._sizes[record.group] += record.nbytes
            self._members[record.group] += 1

    def _uncount(self, record: Record) -> None:
        self.nbytes -= record.nbytes
        if not self._groups:
            return
        self._sizes[record.group] -= record.nbytes
        self._members[record.group] -= 1
        if not self._members[record.group]:
            for table in (self._members, self._sizes, self._heaps):
                table.pop(record.group, None)
