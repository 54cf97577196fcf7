"""One cache in one tier, replayed: which documents hit, and how long the prefills took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.eviction.traces import Trace
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.store.eviction import Access, EvictionPolicy, Ranking

TREE, CHUNKS = "tree", "chunks"


@dataclass(frozen=True)
class Plan:
    """A trace as the entries that its requests use.

    Attributes
    ----------
    trace : Trace
    structure : str
        ``tree``: an entry is a document behind certain others, usable only with all of those (RAGCache's
        knowledge tree). ``chunks``: an entry is a document, wherever it stands.
    requests : tuple of tuple of int
        Entry numbers.
    tokens : tuple of int
        Of each entry.
    parents : tuple of int
        Of each entry; -1 for none.
    full_seconds : float
        Prefill time of all requests with nothing but the system prompt cached.
    """

    trace: Trace
    structure: str
    requests: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    full_seconds: float


@dataclass(frozen=True)
class Prompt:
    """What stands around the documents, in tokens: the system prompt is always cached, the question never."""

    system: int = 128
    question: int = 32


@dataclass(frozen=True)
class Outcome:
    """What a replay came to.

    Attributes
    ----------
    hit_rate : float
        Documents that were there by documents retrieved (RAGCache section 7.4).
    token_hit_rate : float
        The same in tokens of documents.
    request_hit_rate : float
        Requests of which every document was there.
    time_saved : float
        Share of the prefill time that was not spent; loading from a slower tier counts as spent.
    """

    hit_rate: float
    token_hit_rate: float
    request_hit_rate: float
    time_saved: float


def plan(trace: Trace, structure: str, profile: PrefillProfile, prompt: Prompt) -> Plan:
    """Number the entries of a trace; ValueError for an unknown structure."""
    if structure not in (TREE, CHUNKS):
        raise ValueError(f"unknown structure {structure!r}; known: {TREE}, {CHUNKS}")
    full = sum(
        profile.seconds(prompt.system, prompt.question + sum(trace.tokens[doc] for doc in request))
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


class Tally:
    """Counts what requests found."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._documents = self._tokens = self._requests = 0
        self._seconds = 0.0

    def add(self, hits: Sequence[int], asked: int, hit_tokens: int, seconds: float) -> None:
        """One request: the entries that were there, of so many."""
        self._documents += len(hits)
        self._tokens += hit_tokens
        self._requests += len(hits) == asked
        self._seconds += seconds

    def outcome(self) -> Outcome:
        """All of them together."""
        requests, tokens = self._plan.requests, self._plan.tokens
        return Outcome(
            self._documents / sum(map(len, requests)),
            self._tokens / sum(tokens[entry] for request in requests for entry in request),
            self._requests / len(requests),
            1 - self._seconds / self._plan.full_seconds,
        )


def replay(
    plan: Plan, policy: EvictionPolicy, capacity: int, profile: PrefillProfile, prompt: Prompt
) -> Outcome:
    """Serve every request of a plan through a cache of ``capacity`` tokens.

    What a request uses is held until it is served; what it lacks is computed, and admitted if there is
    room beside what is held. In a tree an entry is also held while it has children there.
    """
    cache, tally = _Cache(plan, policy, capacity), Tally(plan)
    tokens = plan.tokens
    for entries in plan.requests:
        hits = cache.find(entries)
        hit_tokens = sum(tokens[entry] for entry in hits)
        new = prompt.question + sum(tokens[entry] for entry in entries) - hit_tokens
        seconds = profile.seconds(prompt.system + hit_tokens, new)
        cache.serve(entries, hits, Access(False, seconds, new))
        tally.add(hits, len(entries), hit_tokens, seconds)
    return tally.outcome()


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
