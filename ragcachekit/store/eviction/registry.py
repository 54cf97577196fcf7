"""The registry of eviction policies: adding one is one file and one line here."""

from __future__ import annotations

import time
from collections.abc import Callable

from ragcachekit.store.eviction.base import EvictionPolicy
from ragcachekit.store.eviction.policies import FrequencyReuse, Gdsf, Lfu, Lru, Pgdsf
from ragcachekit.store.eviction.window import Seconds

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
        return POLICIES[kind](Seconds(int(number[:-1]), time.monotonic))
    if not number.isdecimal():
        unit = "accesses, nor of seconds such as 600s" if kind in _WITH_WINDOW else "accesses"
        raise ValueError(f"eviction policy {name!r}: {number!r} is no whole number of {unit}")
    return POLICIES[kind](int(number))
