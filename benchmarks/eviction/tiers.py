"""The knowledge tree over two tiers, replayed: GPU memory above host memory (RAGCache section 5.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.eviction.replay import Outcome, Plan, Prompt, Tally
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.store.eviction import Access, EvictionPolicy, Ranking

PREFILL, RELOAD, ALWAYS_RELOAD = "prefill", "reload", "always-reload"
GPU_COSTS = (PREFILL, RELOAD, ALWAYS_RELOAD)


@dataclass(frozen=True)
class Tiers:
    """Two budgets and the way between them.

    Attributes
    ----------
    gpu, host : int
        Tokens.
    load_seconds : float
        Per token, from host to GPU memory.
    gpu_cost : str
        What a miss counts as in the GPU's ranking. ``prefill``: what computing the entry cost (the
        paper). ``reload``: where the host had a copy, what bringing it back cost. ``always-reload``: that
        for computed entries too, because once evicted they will be on the host.
    """

    gpu: int
    host: int
    load_seconds: float
    gpu_cost: str = PREFILL

    def __post_init__(self) -> None:
        if self.gpu_cost not in GPU_COSTS:
            raise ValueError(f"unknown gpu_cost {self.gpu_cost!r}; known: {', '.join(GPU_COSTS)}")


@dataclass(frozen=True)
class TwoTierOutcome:
    """What a replay came to.

    Attributes
    ----------
    all : Outcome
        Entries in either tier count as hits.
    gpu_hit_rate : float
        Documents that were in GPU memory by documents retrieved.
    swapped_tokens : int
        Copied from GPU to host memory.
    """

    all: Outcome
    gpu_hit_rate: float
    swapped_tokens: int


def replay_tiers(
    plan: Plan,
    policy: Callable[[], EvictionPolicy],
    tiers: Tiers,
    profile: PrefillProfile,
    prompt: Prompt,
) -> TwoTierOutcome:
    """Serve every request of a tree's plan through two tiers that each rank with an own policy object.

    What leaves the GPU goes to the host the first time; later it is only freed. What is found on the
    host is loaded before the prefill begins (no overlap).
    """
    cache, tally = _TwoTiers(plan, policy, tiers), Tally(plan)
    in_gpu = 0
    for entries in plan.requests:
        hits, loaded = cache.find(entries)
        hit_tokens = sum(plan.tokens[entry] for entry in hits)
        new = prompt.question + sum(plan.tokens[entry] for entry in entries) - hit_tokens
        prefill = profile.seconds(prompt.system + hit_tokens, new)
        loading = tiers.load_seconds * sum(plan.tokens[entry] for entry in loaded)
        cache.serve(entries, hits, loaded, Access(False, prefill, new))
        tally.add(hits, len(entries), hit_tokens, prefill + loading)
        in_gpu += len(hits) - len(loaded)
    return TwoTierOutcome(tally.outcome(), in_gpu / sum(map(len, plan.requests)), cache.swapped)


class _Tier:
    """A ranking in which an entry is held while it has children here."""

    def __init__(self, plan: Plan, policy: EvictionPolicy, capacity: int) -> None:
        self._tokens, self._parents, self._capacity = plan.tokens, plan.parents, capacity
        self.ranking: Ranking[int] = Ranking(policy)
        self._children: Counter[int] = Counter()

    def admit(self, entry: int, access: Access, evicted: Callable[[int], None]) -> bool:
        """Rank it, then evict others until it fits (Algorithm 1); False if that cannot be."""
        ranking, size, parent = self.ranking, self._tokens[entry], self._parents[entry]
        if size > self._capacity:
            return False
        ranking.add(entry, size, access=access)
        # One hold for itself, as long as room is made, and on the host, where children arrive before
        # their parent does, one for each of them.
        for _ in range(1 + self._children[entry]):
            ranking.hold(entry)
        self._children[parent] += 1
        ranking.hold(parent)
        while ranking.nbytes > self._capacity:
            victim = ranking.evict()
            if victim is None:
                self._left(entry)
                ranking.remove(entry)
                return False
            self._left(victim)
            evicted(victim)
        ranking.release(entry)
        return True

    def _left(self, entry: int) -> None:
        self._children[self._parents[entry]] -= 1
        self.ranking.release(self._parents[entry])


class _TwoTiers:
    def __init__(self, plan: Plan, policy: Callable[[], EvictionPolicy], tiers: Tiers) -> None:
        self._tokens, self._tiers = plan.tokens, tiers
        self._gpu, self._host = _Tier(plan, policy(), tiers.gpu), _Tier(plan, policy(), tiers.host)
        self._computed: dict[int, Access] = {}
        self.swapped = 0

    def find(self, entries: Sequence[int]) -> tuple[list[int], list[int]]:
        """The prefix that either tier has, and which of it must be loaded."""
        hits: list[int] = []
        for entry in entries:
            if entry not in self._gpu.ranking and entry not in self._host.ranking:
                break
            hits.append(entry)
        return hits, [entry for entry in hits if entry not in self._gpu.ranking]

    def serve(
        self, entries: Sequence[int], hits: Sequence[int], loaded: Sequence[int], missed: Access
    ) -> None:
        costs = {entry: self._gpu_cost(entry, loaded, missed) for entry in entries}
        held = [(tier, entry) for entry in hits for tier in (self._gpu, self._host) if entry in tier.ranking]
        for tier, entry in held:
            tier.ranking.touch(entry)
            tier.ranking.hold(entry)
        for entry in entries:
            if entry in self._gpu.ranking:
                continue
            if entry not in hits:
                self._computed[entry] = missed
            if not self._gpu.admit(entry, costs[entry], self._swap_out):
                break
            self._gpu.ranking.hold(entry)
            held.append((self._gpu, entry))
        for tier, entry in held:
            tier.ranking.release(entry)

    def _gpu_cost(self, entry: int, loaded: Sequence[int], missed: Access) -> Access:
        if self._tiers.gpu_cost == PREFILL:
            return Access(False) if entry in loaded else missed  # a load says nothing of its prefill
        if entry not in loaded and self._tiers.gpu_cost == RELOAD:
            return missed
        tokens = self._tokens[entry]
        return Access(False, self._tiers.load_seconds * tokens, tokens)

    def _swap_out(self, entry: int) -> None:
        if entry in self._host.ranking:
            return
        if self._host.admit(entry, self._computed[entry], lambda _: None):
            self.swapped += self._tokens[entry]
