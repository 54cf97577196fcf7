"""The entries of one tier in the order of eviction: heaps over a policy's numbers."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from ragcachekit.store.eviction.base import HIT, MISS, Access, EvictionPolicy, Record

K = TypeVar("K", bound=Hashable)

_REMEMBERED = 4096
"""Evicted entries that are remembered at least; where a tier holds more, as many as it holds."""


class Ranking(Generic[K]):
    """Who is in a tier, how large, and who leaves next. Every operation is O(log n), amortised.

    Not thread safe: it belongs to a tier and its lock. An entry that is held (in use by a request, or
    with children in a tree) keeps its place but is passed over. What a policy knew of an entry survives
    its eviction for a while (RAGCache section 5.1 counts retrievals of documents, cached or not), but not
    its removal.

    Parameters
    ----------
    policy : EvictionPolicy
        This ranking's own.
    groups : bool
        Whether anything will be asked about single groups: who is lowest in one, or its bytes.
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
        """Bytes of all entries."""

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: K) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[K]:
        return iter(self._live)

    def nbytes_of(self, group: str) -> int:
        """Bytes of one group's entries."""
        self._check_groups()
        return self._sizes.get(group, 0)

    def size(self, item: K) -> int:
        """Bytes of an entry; KeyError if it is not here."""
        return self._live[item].nbytes

    def priority(self, item: K) -> float:
        """The policy's number of an entry; KeyError if it is not here."""
        return self._live[item].priority

    def add(
        self,
        item: K,
        nbytes: int,
        tokens: int = 0,
        group: str = "",
        access: Access = MISS,
        *,
        hold: bool = False,
    ) -> None:
        """Take an entry in, or set its size anew; counts as an access. ``hold``: as :meth:`hold` after it."""
        record = self._live.get(item)
        if record is None:
            record = self._past.pop(item, None) or Record(0, 0)
            self._live[item] = record
        else:
            self._uncount(record)
        record.nbytes, record.tokens, record.group = nbytes, tokens, group
        self._count(record)
        record.holds += hold
        self._accessed(item, record, access)

    def touch(self, item: K, access: Access = HIT) -> None:
        """Count an access to an entry; one that is not here is let pass."""
        record = self._live.get(item)
        if record is not None:
            self._accessed(item, record, access)

    def note(self, item: K, access: Access) -> None:
        """Count an access to an entry, also while it is not here: it counts when the entry comes in."""
        if item in self._live:
            self.touch(item, access)
            return
        record = self._past.pop(item, None) or Record(0, 0)
        self._count_access(record, access)
        self._remember(item, record)

    def remove(self, item: K) -> None:
        """Forget an entry and all that was known of it."""
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
        """Undo one :meth:`hold`; lets entries pass that have been removed since."""
        record = self._live.get(item)
        if record is None or not record.holds:
            return
        record.holds -= 1
        if not record.holds:
            self._push(item, record)

    def lowest(self, group: str | None = None) -> K | None:
        """Who would leave next (of one group, where one is named); None if nobody can."""
        if group is not None:
            self._check_groups()
        heap = self._heaps.get(group, [])
        while heap:
            if self._may_leave(heap[0]):
                return heap[0][2]
            heapq.heappop(heap)  # outdated, or held: then its release puts it back
        return None

    def evict(self, group: str | None = None) -> K | None:
        """Take out who leaves next; None if nobody can."""
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
        """Forget everything."""
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

    def _may_leave(self, entry: tuple[float, int, K]) -> bool:
        """Whether what a heap says of an entry is still so, and nobody holds it."""
        priority, at, item = entry
        record = self._live.get(item)
        return record is not None and not record.holds and record.at == at and record.priority == priority

    def _rebuild(self, group: str | None) -> None:
        """Drop what is outdated, held (its release puts it back) or there twice."""
        heap = list({entry for entry in self._heaps[group] if self._may_leave(entry)})
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

    def _check_groups(self) -> None:
        if not self._groups:
            raise ValueError("this ranking keeps nothing about groups; make it with groups=True")
