"""Eviction policies: a number per entry, and the lowest one is evicted first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Access:
    """One request's use of one entry.

    Attributes
    ----------
    hit : bool
        False if the entry was not there and had to be computed.
    seconds : float
        Cost of a miss: estimated prefill time of the whole request, or of reloading. 0 where unknown.
    new_tokens : int
        Tokens that this time was spent on.
    weight : float
        How useful the use was (Cache-Craft: 1 / max(CCI (1 - beta'), 0.05)).
    times : int
        Number of uses. 0 ranks an entry anew by uses that were counted before.
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
    bucket: float = 0
    at: int = 0  # number of the last access, counted over all entries
    missed: int = 0  # misses of known cost
    cost: float = 0.0  # sum over these of seconds per new token
    weight: float = 0.0  # sum of the accesses' weights, as the policy ages it
    holds: int = 0


@runtime_checkable
class EvictionPolicy(Protocol):
    """Ranks the entries of one tier. Implementations promise:

    - both methods take constant time and change nothing but ``record`` and the policy's own clock;
    - they are called under the tier's lock, with ``now`` growing by one per access.

    A policy object belongs to one tier.
    """

    def accessed(self, record: Record, access: Access, now: int) -> None:
        """Set ``record.priority``, and what it depends on, after an access."""
        ...

    def evicted(self, record: Record) -> None:
        """Called when this entry had the lowest priority and was evicted; nothing by default."""
        return


class Seconds(float):
    """A window's length in seconds of the monotonic clock."""


class Window:
    """Counts an entry's accesses within the last ``length``, by two buckets.

    Accesses of the tier, or time, are divided into buckets of that length. The bucket before counts by the
    share of it that the window still covers. This is exact for even use and needs no list of times. A
    frequency is that of the entry's last access, as in RAGCache's Algorithm 1.

    Parameters
    ----------
    length : int, Seconds or None
        Accesses of the tier, or a time, also from before the entry was evicted; None counts accesses since
        the entry last came in.
    """

    def __init__(self, length: int | Seconds | None = None) -> None:
        if length is not None and length < 1:
            raise ValueError(f"a window must be at least 1 access or 1 second long, got {length}")
        self._length = length

    def count(self, record: Record, access: Access, now: int) -> float:
        """Count access number ``now`` of the tier; sets and returns ``record.frequency``."""
        if self._length is None:
            record.frequency = record.frequency + access.times if access.hit else float(access.times)
            return record.frequency
        at = time.monotonic() if isinstance(self._length, Seconds) else now
        bucket, into = divmod(at, self._length)
        passed = bucket - record.bucket
        if passed:
            record.previous = record.current if passed == 1 else 0.0
            record.current, record.bucket = 0.0, bucket
        record.current += access.times
        record.frequency = record.current + record.previous * (1 - into / self._length)
        return record.frequency


PGDSF_WINDOW = 10_000
"""Accesses of the tier."""

HALF_LIFE = 1000
"""Accesses of the tier."""


class Lru(EvictionPolicy):
    """The entry whose last access is longest ago is evicted first."""

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.priority = float(now)


class Lfu(EvictionPolicy):
    """The entry with the fewest accesses in ``window`` is evicted first; of equal ones, the least recent.

    ``window`` is as in :class:`~ragcachekit.store.eviction.Window`.
    """

    def __init__(self, window: int | Seconds | None = None) -> None:
        self._window = Window(window)

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.priority = self._window.count(record, access, now)


class Gdsf(EvictionPolicy):
    """Priority = clock + frequency x cost / size, where cost / size is 1 (RAGCache sections 5.1 and 7.4).

    The clock is the highest priority that was evicted, so that old frequent use ends up below present use.
    ``window`` is as in :class:`~ragcachekit.store.eviction.Window`.
    """

    def __init__(self, window: int | Seconds | None = None) -> None:
        self._window = Window(window)
        self.clock = 0.0

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.priority = self.clock + self._window.count(record, access, now)

    def evicted(self, record: Record) -> None:
        self.clock = max(self.clock, record.priority)


class Pgdsf(Gdsf):
    """Priority = clock + frequency x average cost.

    The average cost is the mean, over the accesses that missed, of the request's prefill time by its new
    tokens. It is divided by the first known cost, which changes no order. An entry of unknown cost counts as
    the average of the known ones; where no cost is known, this is GDSF.
    """

    def __init__(self, window: int | Seconds | None = PGDSF_WINDOW) -> None:
        super().__init__(window)
        self._unit = 0.0
        self._total = 0.0
        self._known = 0

    def accessed(self, record: Record, access: Access, now: int) -> None:
        frequency = self._window.count(record, access, now)
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
        if half_life < 1:
            raise ValueError(f"the half-life of f_r must be at least 1 access, got {half_life}")
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
_WITH_WINDOW = frozenset({"lfu", "gdsf", "pgdsf"})


def weighs_cost(name: str) -> bool:
    """Whether a policy of this name uses the cost of entries."""
    return name.partition(":")[0] == "pgdsf"


def open_eviction(name: str) -> EvictionPolicy:
    """A new policy object for one tier.

    Parameters
    ----------
    name : str
        ``lru``, ``lfu``, ``gdsf``, ``pgdsf`` or ``f_r``; all but the first take a number behind a colon:
        the window of the frequency in accesses of the tier (``pgdsf:20000``) or in seconds
        (``pgdsf:600s``), for ``f_r`` its half-life in accesses.

    Raises
    ------
    ValueError
        For an unknown name (the known ones are listed) or a bad number.
    """
    kind, colon, number = name.partition(":")
    if kind not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
    if not colon:
        return POLICIES[kind]()
    if kind == "lru":
        raise ValueError(f"eviction policy {name!r}: it takes no number; write 'lru'")
    if kind in _WITH_WINDOW and number.endswith("s") and number[:-1].isdecimal():
        return POLICIES[kind](Seconds(number[:-1]))
    if not number.isdecimal():
        unit = "accesses, nor of seconds such as 600s" if kind in _WITH_WINDOW else "accesses"
        raise ValueError(f"eviction policy {name!r}: {number!r} is no whole number of {unit}")
    return POLICIES[kind](int(number))
