"""The contract of eviction policies: a number per entry, and the lowest one is evicted first."""

from __future__ import annotations

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
