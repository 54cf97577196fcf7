"""What no policy can exceed: Belady's optimum where it is one, and true upper bounds elsewhere.

All three functions bound a cache that may also refuse an entry (bypass), and so one that may not. On the
entries of a knowledge tree (documents after certain others) they drop the rule that an entry is of use
only together with its parents, so they bound the tree as well. For equal sizes nothing is lost by that:
a parent is always needed before its children are, so Belady's algorithm, which lets go of what is needed
last, never keeps an entry without its parents, and its hit rate is the optimum of the tree itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def next_uses(accesses: Sequence[int]) -> list[float]:
    """For every access the number of the next one to the same entry; infinity if there is none."""
    out, upcoming = [math.inf] * len(accesses), dict[int, int]()
    for at in range(len(accesses) - 1, -1, -1):
        out[at] = upcoming.get(accesses[at], math.inf)
        upcoming[accesses[at]] = at
    return out


def most_token_hits(accesses: Sequence[int], tokens: Sequence[int], capacity: int) -> float:
    """Most tokens that any cache of ``capacity`` tokens can find, over all accesses.

    Belady's MIN (1966) on single tokens: after each access, the tokens needed furthest in the future
    leave. Tokens are entries of equal size, for which MIN is optimal, and a cache of whole documents is
    one cache of tokens among others; so no cache of documents finds more. It may find a little less,
    because MIN may keep documents in part.
    """
    kept: dict[int, float] = {}
    needed: dict[int, float] = {}
    furthest: list[tuple[float, int]] = []
    free, found = float(capacity), 0.0
    for entry, upcoming in zip(accesses, next_uses(accesses), strict=True):
        found += kept.get(entry, 0.0)
        free -= tokens[entry] - kept.get(entry, 0.0)
        kept[entry], needed[entry] = tokens[entry], upcoming
        heapq.heappush(furthest, (-upcoming, entry))
        while free < 0:
            when, other = furthest[0]
            if needed.get(other) != -when or not kept.get(other):
                heapq.heappop(furthest)
                continue
            leaving = min(kept[other], -free)
            kept[other] -= leaving
            free += leaving
    return found


def most_hits(accesses: Sequence[int], tokens: Sequence[int], capacity: int) -> float:
    """Most accesses that any cache of ``capacity`` tokens can find whole.

    Equal sizes: MIN, exact. Unequal ones: PFOO-L (Berger, Beckmann and Harchol-Balter, "Practical Bounds
    on Optimal Caching with Variable Object Sizes", SIGMETRICS 2018). A hit needs the entry in the cache
    from its last access on: its size times that long. All hits together cannot need more than the
    capacity times the length of the trace, so taking the cheapest ones first (the last in part) gives a
    bound: the capacity then holds on average over time only, which is less than what a cache must obey.
    """
    sizes = {tokens[entry] for entry in accesses}
    if len(sizes) == 1:
        size = sizes.pop()
        return most_token_hits(accesses, tokens, capacity // size * size) / size
    costs = np.sort(_costs(accesses, tokens, capacity))
    spent = np.cumsum(costs)
    budget = float(capacity) * max(0, len(accesses) - 1)
    whole = int(np.searchsorted(spent, budget, side="right"))
    if whole == len(costs):
        return float(whole)
    before = spent[whole - 1] if whole else 0.0
    return whole + float((budget - before) / costs[whole])


def _costs(accesses: Sequence[int], tokens: Sequence[int], capacity: int) -> NDArray[np.float64]:
    """Size times length of what lies between two accesses to an entry that fits at all."""
    spans = [
        tokens[entry] * (upcoming - at)
        for at, (entry, upcoming) in enumerate(zip(accesses, next_uses(accesses), strict=True))
        if upcoming < math.inf and tokens[entry] <= capacity
    ]
    return np.array(spans, np.float64)
