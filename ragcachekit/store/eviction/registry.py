"""The registry of eviction policies: adding one is one file and one line here."""

from __future__ import annotations

import time
from collections.abc import Callable

from ragcachekit.store.eviction.base import EvictionPolicy
from ragcachekit.store.eviction.gdsf import Gdsf
from ragcachekit.store.eviction.lfu import Lfu
from ragcachekit.store.eviction.lru import Lru
from ragcachekit.store.eviction.pgdsf import Pgdsf
from ragcachekit.store.eviction.reuse import FrequencyReuse
from ragcachekit.store.eviction.window import Seconds

_POLICIES: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "gdsf": Gdsf,
    "pgdsf": Pgdsf,
    "f_r": FrequencyReuse,
}
_WITHOUT_NUMBER = frozenset({"lru"})
_WITH_WINDOW = frozenset({"lfu", "gdsf", "pgdsf"})


def known_evictions() -> tuple[str, ...]:
    """The names that :func:`open_eviction` accepts."""
    return tuple(_POLICIES)


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
    if kind not in _POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(known_evictions())}")
    if not colon:
        return _POLICIES[kind]()
    if kind in _WITHOUT_NUMBER:
        raise ValueError(f"eviction policy {name!r}: {kind} takes no number; write {kind!r}")
    if kind in _WITH_WINDOW and number.endswith("s") and number[:-1].isdecimal():
        return _POLICIES[kind](Seconds(int(number[:-1]), time.monotonic))
    if not number.isdecimal():
        unit = "accesses, nor of seconds such as 600s" if kind in _WITH_WINDOW else "accesses"
        raise ValueError(f"eviction policy {name!r}: {number!r} is no whole number of {unit}")
    return _POLICIES[kind](int(number))
