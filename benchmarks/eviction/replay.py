"""One cache in one tier, replayed: which documents hit, and how long the prefills took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.eviction.traces import Trace
from benchmarks.shapes import SHAPES, Shape
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.store.eviction import Access, EvictionPolicy, Ranking

TREE, CHUNKS = "tree", "chunks"
SYSTEM, QUESTION = 128, 32
"""Tokens around the documents: the system prompt is always cached, the question never."""

_FLOPS, _MEMORY, _WIDTH = 60e12, 500e9, 2
"""An A10G-like GPU: operations and bytes per second, bytes of a value. Assumed: the proportions matter."""


def prefill_by_arithmetic(shape: Shape) -> PrefillProfile:
    """Prefill times of a shape: weights are read once, a row costs two operations per weight, a pair four per
    layer and dimension."""
    kv_width = shape.hidden * shape.kv_heads // shape.heads
    weights = shape.layers * (
        2 * shape.hidden * shape.hidden + 2 * shape.hidden * kv_width + 3 * shape.hidden * shape.inter
    )
    return PrefillProfile(
        fixed=weights * _WIDTH / _MEMORY,
        per_row=2 * weights / _FLOPS,
        per_pair=4 * shape.layers * shape.hidden / _FLOPS,
    )


PROFILE = prefill_by_arithmetic(SHAPES["llama-3.1-8b"])


@dataclass(frozen=True)
class Plan:
    """A trace as the entries that its requests use.

    In a ``tree`` an entry is a document after certain others, usable only with all of those (RAGCache's
    knowledge tree); of ``chunks`` it is a document at any place. ``requests`` are entry numbers,
    ``tokens`` and ``parents`` (-1: none) those of each entry, ``full_seconds`` the prefill time of all
    requests with nothing but the system prompt cached.
    """

    trace: Trace
    structure: str
    requests: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    full_seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a replay came to, as shares.

    ``hit_rate`` is of documents that were there (RAGCache section 7.4), ``token_hit_rate`` of their tokens,
    ``request_hit_rate`` of requests of which every document was there, ``time_saved`` of the prefill time.
    """

    hit_rate: float
    token_hit_rate: float
    request_hit_rate: float
    time_saved: float


def plan(trace: Trace, structure: str) -> Plan:
    """Number the entries of a trace."""
    full = sum(
        PROFILE.seconds(SYSTEM, QUESTION + sum(trace.tokens[doc] for doc in request))
        for request in trace.requests
    )
    if structure == CHUNKS:
        return Plan(trace, structure, trace.requests, trace.tokens, (-1,) * len(trace.tokens), full)
    numbers: dict[tuple[int, int], int] = {}
    requests = []
    for request in trace.requests:
        path = [-1]
        for doc in request:
            path.append(numbers.setdefault((path[-1], doc), len(numbers)))
        requests.append(tuple(path[1:]))
    tokens = tuple(trace.tokens[doc] for _, doc in numbers)
    return Plan(trace, structure, tuple(requests), tokens, tuple(parent for parent, _ in numbers), full)


def replay(plan: Plan, policy: EvictionPolicy, capacity: int) -> Outcome:
    """Serve every request of a plan through a cache of ``capacity`` tokens.

    What a request uses is held until it is served; what it lacks is computed, and admitted if there is
    room beside what is held. In a tree an entry is also held while it has children there.
    """
    cache, tokens = _Cache(plan, policy, capacity), plan.tokens
    documents = found_tokens = whole = 0
    seconds = 0.0
    for entries in plan.requests:
        hits = cache.find(entries)
        hit_tokens = sum(tokens[entry] for entry in hits)
        new = QUESTION + sum(tokens[entry] for entry in entries) - hit_tokens
        spent = PROFILE.seconds(SYSTEM + hit_tokens, new)
        cache.serve(entries, hits, Access(False, spent, new))
        documents, found_tokens = documents + len(hits), found_tokens + hit_tokens
        whole, seconds = whole + (len(hits) == len(entries)), seconds + spent
    asked = [entry for request in plan.requests for entry in request]
    return Outcome(
        documents / len(asked),
        found_tokens / sum(tokens[entry] for entry in asked),
        whole / len(plan.requests),
        1 - seconds / plan.full_seconds,
    )


class _Cache:
    def __init__(self, plan: Plan, policy: EvictionPolicy, capacity: int) -> None:
        self._tree = plan.structure == TREE
        self._tokens, self._parents = plan.tokens, plan.parents
        self._capacity = capacity
        self._ranking: Ranking[int] = Ranking(policy)

    def find(self, entries: Sequence[int]) -> Sequence[int]:
        """Those that can be used: the first ones without a gap, or in a flat cache any."""
        if not self._tree:
            return [entry for entry in entries if entry in self._ranking]
        for count, entry in enumerate(entries):
            if entry not in self._ranking:
                return entries[:count]
        return entries

    def serve(self, entries: Sequence[int], hits: Sequence[int], missed: Access) -> None:
        held = list(hits)
        for entry in hits:
            self._ranking.touch(entry)
            self._ranking.hold(entry)
        for entry in entries:
            if entry in hits:
                continue
            if self._admit(entry, missed):
                held.append(entry)
            elif self._tree:
                break  # its descendants would never match
        for entry in held:
            self._ranking.release(entry)

    def _admit(self, entry: int, missed: Access) -> bool:
        """Rank it, then evict others until it fits: Algorithm 1 ranks by the clock before the eviction."""
        ranking, size, parent = self._ranking, self._tokens[entry], self._parents[entry]
        if size > self._capacity:
            return False
        ranking.add(entry, size, access=missed)
        ranking.hold(entry)
        ranking.hold(parent)  # -1, where there is none, is not here
        while ranking.nbytes > self._capacity:
            victim = ranking.evict()
            if victim is None:
                ranking.release(parent)
                ranking.remove(entry)
                return False
            ranking.release(self._parents[victim])
        return True
