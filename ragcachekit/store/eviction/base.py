"""The contract of eviction policies: a number per entry, and the lowest one leaves first."""

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
        What having missed costs: estimated prefill time of the whole request, or of reloading. 0 where
        nobody knows.
    new_tokens : int
        Tokens that this time was spent on.
    worth : float
        How useful the use was, for policies that weigh uses (Cache-Craft: 1 / max(CCI (1 - beta'), 0.05)).
    times : int
        Uses that this stands for. 0 ranks an entry anew by uses that were counted before.
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
    """What is remembered about an entry, for some time also after it was evicted.

    Attributes
    ----------
    nbytes, tokens : int
    group : str
        Its namespace.
    priority : float
        The policy's number.
    frequency : float
        Accesses within the policy's window, as of the last access.
    current, previous : float
        What that is made of where the window slides: accesses in its two buckets.
    bucket : int
        Number of the window's bucket that ``current`` counts in.
    at : int
        Number of the last access, counted over all entries.
    missed : int
        Accesses that missed and whose cost was known.
    cost : float
        Sum over these of seconds per new token.
    worth : float
        Sum of the accesses' worth, as the policy ages it.
    holds : int
        How often it is held now: then it does not leave, whatever its priority.
    """

    nbytes: int
    tokens: int
    group: str = ""
    priority: float = 0.0
    frequency: float = 0.0
    current: float = 0.0
    previous: float = 0.0
    bucket: int = 0
    at: int = 0
    missed: int = 0
    cost: float = 0.0
    weight: float = 0.0
    holds: int = 0


@runtime_checkable
class EvictionPolicy(Protocol):
    """Ranks the entries of one tier. Implementations promise:

    - both methods take constant time and touch nothing but ``record`` and the policy's own clock;
    - they are called under the tier's lock, with ``now`` growing by one per access.

    A policy object belongs to one tier (PGDSF keeps a clock per tier).
    """

    @property
    def name(self) -> str:
        """As the user writes it: ``lru``, ``pgdsf``."""
        ...

    def accessed(self, record: Record, access: Access, now: int) -> None:
        """Set ``record.priority``, and whatever it is made of, after an access."""
        ...

    def evicted(self, record: Record) -> None:
        """Hear that this entry was the lowest and has left."""
        ...
