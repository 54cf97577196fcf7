"""Eviction and a tier's counters.

Policies give every entry a number, and the lowest one in the ranking is evicted first.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

from ragcachekit.store.base import StoreStats

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """One request's use of one entry.

    - ``hit``: False if the entry was not there and had to be computed.
    - ``seconds``: Cost of a miss: estimated prefill time of the whole request, or of reloading; 0: unknown.
    - ``new_tokens``: Tokens that this time was spent on.
    - ``weight``: How useful the use was (Cache-Craft: 1 / max(CCI (1 - beta'), 0.05)).
    - ``times``: Number of uses. 0 ranks an entry anew by uses that were counted before.
    """

    hit: bool = True
    seconds: float = 0.0
    new_tokens: int = 0
    weight: float = 1.0
    times: int = 1


HIT = Access()
MISS = Access(hit=False)


@dataclass(slots=True)
class Record:
    """State of one entry, kept for some time after its eviction."""

    nbytes: int = 0
    group: str = ""  # its namespace
    priority: float = 0.0
    frequency: float = 0.0  # accesses within the policy's window, as of the last access
    current: float = 0.0  # accesses in the bucket of the window with the number ``bucket``
    previous: float = 0.0  # accesses in the bucket before
    bucket: int = 0
    at: int = 0  # number of the last access, counted over all entries
    missed: int = 0  # misses of known cost
    cost: float = 0.0  # sum over these of seconds per new token
    weight: float = 0.0  # sum of the accesses' weights, as the policy ages it
    holds: int = 0
    retain: float = 0.0  # seconds after each use in which it goes after all that is not retained
    until: float = 0.0  # end of these, of time.monotonic; 0: not retained

    @property
    def rank(self) -> float:
        """Place among the retained entries, or among the others."""
        return self.until or self.priority

    def count(self, access: Access, now: int, window: int | None) -> float:
        """Set and return ``frequency`` for access number ``now`` of the tier.

        Accesses of the tier are divided into buckets of ``window``; the bucket before counts by the share of
        it that the window still covers. This is exact for even use and needs no list of times. A frequency is
        that of the last access, as in RAGCache's Algorithm 1. None counts accesses since the entry came in.
        """
        if window is None:
            self.frequency = self.frequency + access.times if access.hit else float(access.times)
            return self.frequency
        bucket, into = divmod(now, window)
        if bucket != self.bucket:
            self.previous = self.current if bucket == self.bucket + 1 else 0.0
            self.current, self.bucket = 0.0, bucket
        self.current += access.times
        self.frequency = self.current + self.previous * (1 - into / window)
        return self.frequency


class EvictionPolicy:
    """Ranks the entries of one tier, to which a policy object belongs. Implementations promise:

    - both methods take constant time and change nothing but ``record`` and the policy's own clock;
    - they are called under the tier's lock, with ``now`` growing by one per access.
    """

    def accessed(self, record: Record, access: Access, now: int) -> None:
        """Set ``record.priority``, and what it depends on, after an access."""
        raise NotImplementedError

    def evicted(self, record: Record) -> None:
        """Called when this entry had the lowest priority and was evicted; nothing by default."""
        return


PGDSF_WINDOW = 10_000
"""Accesses of the tier."""

HALF_LIFE = 1000
"""Accesses of the tier."""


class Lru(EvictionPolicy):
    """The entry whose last access is longest ago is evicted first."""

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.priority = float(now)


class Lfu(EvictionPolicy):
    """The entry with the fewest accesses is evicted first; of equal ones, the least recent.

    ``window`` is as in :meth:`Record.count`.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.priority = record.count(access, now, self._window)


class Gdsf(EvictionPolicy):
    """Priority = clock + frequency x cost / size, where cost / size is 1 (RAGCache sections 5.1 and 7.4).

    The clock is the highest priority that was evicted, so that old frequent use ends up below present use.
    ``window`` is as in :meth:`Record.count`.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self.clock = 0.0

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.priority = self.clock + record.count(access, now, self._window)

    def evicted(self, record: Record) -> None:
        self.clock = max(self.clock, record.priority)


class Pgdsf(Gdsf):
    """Priority = clock + frequency x average cost.

    The average cost is the mean, over the accesses that missed, of the request's prefill time by its new
    tokens. It is divided by the first known cost, which changes no order. An entry of unknown cost counts as
    the average of the known ones; where no cost is known, this is GDSF.
    """

    def __init__(self, window: int | None = PGDSF_WINDOW) -> None:
        super().__init__(window)
        self._unit = self._total = 0.0
        self._known = 0

    def accessed(self, record: Record, access: Access, now: int) -> None:
        frequency = record.count(access, now, self._window)
        if not access.hit and access.seconds > 0 and access.new_tokens > 0:
            cost = access.seconds / access.new_tokens
            record.missed += 1
            record.cost += cost
            self._unit = self._unit or cost
            self._total += cost
            self._known += 1
        record.priority = self.clock + frequency * self._cost(record)

    def _cost(self, record: Record) -> float:
        if not self._known:
            return 1.0
        average = record.cost / record.missed if record.missed else self._total / self._known
        return average / self._unit


class FrequencyReuse(EvictionPolicy):
    """The entry with the lowest f_r is evicted first; every use adds its weight, 1 / max(CCI (1 - β'), 0.05).

    f_r halves in ``half_life`` accesses of the tier, where the paper lets it grow for ever. All entries
    shrink by the same factor: ranking by log2(f_r) + last access / half_life needs no update of the others.
    """

    def __init__(self, half_life: int = HALF_LIFE) -> None:
        self._half_life = half_life

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.frequency += access.times
        aged = record.weight * 0.5 ** ((now - record.at) / self._half_life)
        record.weight = aged + access.times * access.weight
        if record.weight > 0:
            record.priority = math.log2(record.weight) + now / self._half_life
        else:
            record.priority = -math.inf


POLICIES: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "gdsf": Gdsf,
    "pgdsf": Pgdsf,
    "f_r": FrequencyReuse,
}


def weighs_cost(name: str) -> bool:
    """Whether a policy of this name uses the cost of entries."""
    return name.partition(":")[0] == "pgdsf"


def open_eviction(name: str) -> EvictionPolicy:
    """A new policy object for one tier; ValueError for an unknown name or a bad number.

    ``lru``, ``lfu``, ``gdsf``, ``pgdsf`` or ``f_r``; all but the first take a number after a colon: the
    window of the frequency in accesses of the tier (``pgdsf:20000``), for ``f_r`` its half-life.
    """
    kind, colon, number = name.partition(":")
    if kind not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
    if not colon:
        return POLICIES[kind]()
    if kind == "lru":
        raise ValueError(f"eviction policy {name!r}: it takes no number; write 'lru'")
    if not number.isdecimal() or not int(number):
        raise ValueError(f"eviction policy {name!r}: {number!r} is no whole number of accesses, at least 1")
    return POLICIES[kind](int(number))


K = TypeVar("K", bound=Hashable)

RETAINED_SHARE = 0.5
"""Of the bytes of a tier, or of a group over its quota, that retained entries keep from the others."""

_REMEMBERED = 4096  # evicted entries at least; where a tier holds more, as many as it holds


class Ranking(Generic[K]):
    """The entries of a tier, their sizes and their order of eviction; O(log n) per operation, amortised.

    Not thread safe. A held entry (with children in a tree) keeps its place but is skipped. An entry's record
    survives its eviction for a while (RAGCache section 5.1 counts retrievals of documents, cached or not),
    but not its removal. What concerns one group (a namespace over its quota) looks at every entry.

    An entry that is retained goes after the others until it was not used for its time. Only beyond
    :data:`RETAINED_SHARE` retained ones go first, those whose time ends first.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._live: dict[K, Record] = {}
        self._past: OrderedDict[K, Record] = OrderedDict()
        self._heap: list[tuple[float, int, K]] = []
        self._retained: list[tuple[float, int, K]] = []  # a heap as well, by the ends of their times
        self._now = 0
        self.nbytes = self._retained_bytes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: K) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[K]:
        return iter(self._live)

    def nbytes_of(self, group: str) -> int:
        return sum(record.nbytes for record in self._live.values() if record.group == group)

    def record(self, item: K) -> Record:
        """The state of an entry; KeyError if it is not here."""
        return self._live[item]

    def add(
        self, item: K, nbytes: int, group: str = "", access: Access = MISS, *, hold: bool = False
    ) -> None:
        """Add an entry, or set its size; counts as an access. ``hold``: as :meth:`hold` after it."""
        record = self._live.get(item)
        if record is None:
            record = self._live[item] = self._past.pop(item, Record())
            record.nbytes = 0
        self.nbytes += nbytes - record.nbytes
        self._retained_bytes += nbytes - record.nbytes if record.until else 0
        record.nbytes, record.group = nbytes, group
        record.holds += hold
        self.touch(item, access)

    def touch(self, item: K, access: Access = HIT) -> None:
        """Count an access to an entry that is here."""
        record = self._live.get(item)
        if record is not None:
            self._count(record, access)
            if record.retain:
                self._renew(record)
            if not record.holds:  # else its release does it, once for all uses until then
                self._push(item, record)

    def retain(self, item: K, seconds: float) -> None:
        """Retain an entry that is here until it was not used for so many seconds, if that is longer."""
        record = self._live.get(item)
        if record is not None and seconds > 0 and time.monotonic() + seconds > record.until:
            record.retain = seconds
            self._renew(record)
            if not record.holds:
                self._push(item, record)

    def note(self, item: K, access: Access) -> None:
        """Count an access to an entry, also while it is not here."""
        if item in self._live:
            self.touch(item, access)
            return
        record = self._past.pop(item, Record())
        self._count(record, access)
        self._remember(item, record)

    def remove(self, item: K) -> None:
        """Remove an entry and its record."""
        self._past.pop(item, None)
        record = self._live.pop(item, None)
        if record is not None:
            self.nbytes -= record.nbytes
            self._end(record)

    def hold(self, item: K) -> None:
        """Keep an entry from eviction until it is released as often as it was held."""
        record = self._live.get(item)
        if record is not None:
            record.holds += 1

    def release(self, item: K) -> None:
        """Undo one :meth:`hold`; nothing if the entry has been removed since."""
        record = self._live.get(item)
        if record is not None and record.holds:
            record.holds -= 1
            if not record.holds:
                self._push(item, record)

    def lowest(self, group: str | None = None) -> K | None:
        """The next entry to be evicted (of one group); None if all are held."""
        self._end_lapsed()
        if group is not None:
            own = {item: record for item, record in self._live.items() if record.group == group}
            retained = sum(record.nbytes for record in own.values() if record.until)
            over = retained > RETAINED_SHARE * sum(record.nbytes for record in own.values())
            free = [(bool(r.until) != over, r.rank, r.at, i) for i, r in own.items() if not r.holds]
            return min(free)[3] if free else None
        over = self._retained_bytes > RETAINED_SHARE * self.nbytes
        for heap in (self._retained, self._heap) if over else (self._heap, self._retained):
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
        record = self._live.pop(item)
        self.nbytes -= record.nbytes
        self._end(record)
        self._policy.evicted(record)
        self._remember(item, record)
        return item

    def clear(self) -> None:
        for table in (self._live, self._past, self._heap, self._retained):
            table.clear()
        self.nbytes = self._retained_bytes = 0

    def _remember(self, item: K, record: Record) -> None:
        self._past[item] = record
        while len(self._past) > max(_REMEMBERED, len(self._live)):
            self._past.popitem(last=False)

    def _count(self, record: Record, access: Access) -> None:
        self._now += 1
        self._policy.accessed(record, access, self._now)
        record.at = self._now

    def _push(self, item: K, record: Record) -> None:
        # Numbers of accesses are unique, so only an item and itself are ever compared.
        heap = self._retained if record.until else self._heap
        heapq.heappush(heap, (record.rank, record.at, item))
        if len(heap) > 2 * len(self._live) + 64:  # drop what is outdated, held or there twice
            heap[:] = set(filter(self._is_evictable, heap))
            heapq.heapify(heap)

    def _is_evictable(self, entry: tuple[float, int, K]) -> bool:
        """Whether an entry of a heap is up to date and not held."""
        rank, at, item = entry
        record = self._live.get(item)
        return record is not None and not record.holds and record.at == at and record.rank == rank

    def _renew(self, record: Record) -> None:
        self._retained_bytes += 0 if record.until else record.nbytes
        record.until = time.monotonic() + record.retain

    def _end(self, record: Record) -> None:
        """Retain no longer."""
        self._retained_bytes -= record.nbytes if record.until else 0
        record.retain = record.until = 0.0

    def _end_lapsed(self) -> None:
        while self._retained and self._retained[0][0] <= time.monotonic():
            entry = heapq.heappop(self._retained)
            if self._is_evictable(entry):
                record = self._live[entry[2]]
                self._end(record)
                self._push(entry[2], record)


# -- counters ------------------------------------------------------------------------------------------


class Counters:
    """Thread-safe event counts of one tier, and a log of its failures."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = Lock()
        self._warned: set[str] = set()
        self._counts = {"hits": 0, "misses": 0, "evictions": 0, "damaged": 0, "failed_writes": 0}

    def count(self, event: str, by: int = 1) -> None:
        """Add to ``hits``, ``misses``, ``evictions``, ``damaged`` or ``failed_writes``."""
        with self._lock:
            self._counts[event] += by

    def warn_once(self, kind: str, message: str, *args: object) -> None:
        """Log a warning the first time, at debug level afterwards."""
        with self._lock:
            level = logging.DEBUG if kind in self._warned else logging.WARNING
            self._warned.add(kind)
        _log.log(level, f"%s tier: {message}", self._tier, *args)

    def stats(self, *, entries: int, nbytes: int, budget: int, writable: bool = True) -> StoreStats:
        """The counts together with the tier's present content."""
        with self._lock:
            return StoreStats(self._tier, entries, nbytes, budget, **self._counts, writable=writable)
