"""Replays against a simulator that keeps plain dicts and looks at every entry at every eviction."""

from __future__ import annotations

import pytest

from benchmarks.eviction.bounds import most_hits, most_token_hits
from benchmarks.eviction.replay import CHUNKS, TREE, Plan, Prompt, plan, replay
from benchmarks.eviction.tiers import GPU_COSTS, PREFILL, Tiers, replay_tiers
from benchmarks.eviction.traces import TRACES, Trace, TraceShape, open_trace
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.store.eviction import POLICIES, Lru, Pgdsf, Ranking, open_eviction

PROFILE = PrefillProfile(0.01, 0.001, 1e-6)
PROMPT = Prompt(system=50, question=10)
SHAPE = TraceShape(documents=60, requests=300, top_k=3, mean_tokens=100)
LOADING = 1e-5


def plain(trace, capacity, policy, *, tree=True):
    """Document hits, token hits and seconds by LRU or PGDSF, from the definitions."""
    cache, counts, costs = {}, {}, {}  # path -> priority and time; path -> accesses; path -> costs
    clock, now, first = 0.0, 0, None
    hits = tokens = seconds = 0
    for request in trace.requests:
        paths = [request[: at + 1] if tree else (doc,) for at, doc in enumerate(request)]
        found = [path in cache for path in paths]
        if tree and False in found:
            found = [at < found.index(False) for at in range(len(found))]
        sizes = {path: trace.tokens[path[-1]] for path in paths}
        cached = sum(sizes[p] for p, hit in zip(paths, found, strict=True) if hit)
        new = PROMPT.question + sum(sizes.values()) - cached
        spent = PROFILE.seconds(PROMPT.system + cached, new)
        first = first or spent / new
        hits, tokens, seconds = hits + sum(found), tokens + cached, seconds + spent
        order = sorted(range(len(paths)), key=lambda at: not found[at])
        for at in order:
            path = paths[at]
            if not found[at]:
                if sizes[path] > capacity:
                    if tree:
                        break
                    continue
                costs.setdefault(path, []).append(spent / new)
            now += 1
            counts[path] = counts.get(path, 0) + 1
            mean = sum(costs[path]) / len(costs[path])
            cache[path] = (now if policy == "lru" else clock + counts[path] * mean / first, now)
            in_use = set(paths[: at + 1]) if tree else {paths[a] for a in order[: order.index(at) + 1]}
            in_use |= {p for p, hit in zip(paths, found, strict=True) if hit}
            full = False
            while sum(trace.tokens[p[-1]] for p in cache) > capacity:
                parents = {p[:-1] for p in cache} if tree else set()
                free = [p for p in cache if p not in in_use and p not in parents]
                if not free:
                    full = True
                    break
                victim = min(free, key=lambda p: cache[p])
                clock = max(clock, cache.pop(victim)[0])
            if full:
                del cache[path], counts[path], costs[path]
                if tree:
                    break
    return hits, tokens, seconds


@pytest.mark.parametrize("capacity", [120, 400, 1500])
@pytest.mark.parametrize("policy", ["lru", "pgdsf"])
@pytest.mark.parametrize("structure", [TREE, CHUNKS])
def test_a_replay_is_what_the_definitions_say(structure, policy, capacity):
    for seed in range(3):
        trace = open_trace("zipf", SHAPE, seed)
        outcome = replay(
            plan(trace, structure, PROFILE, PROMPT), open_eviction(policy), capacity, PROFILE, PROMPT
        )
        hits, tokens, seconds = plain(trace, capacity, policy, tree=structure == TREE)
        asked = [doc for request in trace.requests for doc in request]
        full = sum(
            PROFILE.seconds(50, 10 + sum(trace.tokens[doc] for doc in request)) for request in trace.requests
        )
        assert outcome.hit_rate == pytest.approx(hits / len(asked))
        assert outcome.token_hit_rate == pytest.approx(tokens / sum(trace.tokens[doc] for doc in asked))
        assert outcome.time_saved == pytest.approx(1 - seconds / full)


def test_by_hand():
    """[1, 2] then [1, 3]: one of two documents hits, as in the paper's example."""
    trace = Trace("hand", (10, 10, 10, 10), ((1, 2), (1, 3), (2, 1), (1, 2)), 40)
    outcome = replay(plan(trace, TREE, PROFILE, PROMPT), Lru(), 1000, PROFILE, PROMPT)
    assert outcome.hit_rate == 3 / 8
    assert outcome.request_hit_rate == 1 / 4
    flat = replay(plan(trace, CHUNKS, PROFILE, PROMPT), Lru(), 1000, PROFILE, PROMPT)
    assert flat.hit_rate == 5 / 8
    assert flat.request_hit_rate == 2 / 4


@pytest.mark.parametrize("structure", [TREE, CHUNKS])
@pytest.mark.parametrize("name", TRACES)
def test_no_policy_exceeds_the_bounds(name, structure):
    made = plan(open_trace(name, SHAPE, 1), structure, PROFILE, PROMPT)
    accesses = [entry for request in made.requests for entry in request]
    asked = sum(made.tokens[entry] for entry in accesses)
    for capacity in (200, 1000, 4000):
        hits = most_hits(accesses, made.tokens, capacity) / len(accesses)
        tokens = most_token_hits(accesses, made.tokens, capacity) / asked
        for policy in POLICIES:
            outcome = replay(made, open_eviction(policy), capacity, PROFILE, PROMPT)
            assert 0 < outcome.hit_rate <= hits
            assert outcome.token_hit_rate <= tokens
            assert outcome.request_hit_rate <= outcome.hit_rate


def test_all_policies_agree_where_everything_fits():
    made = plan(open_trace("zipf", SHAPE, 2), TREE, PROFILE, PROMPT)
    found = {replay(made, open_eviction(p), 10**9, PROFILE, PROMPT) for p in POLICIES}
    assert len(found) == 1
    accesses = [entry for request in made.requests for entry in request]
    assert found.pop().hit_rate == pytest.approx(1 - len(set(accesses)) / len(accesses))


def test_an_unknown_structure_is_refused():
    with pytest.raises(ValueError, match="known: tree, chunks"):
        plan(open_trace("zipf", SHAPE, 2), "list", PROFILE, PROMPT)


def two_tiers(made: Plan, gpu, host, cost=PREFILL, policy=Pgdsf):
    return replay_tiers(made, policy, Tiers(gpu, host, LOADING, cost), PROFILE, PROMPT)


def test_a_host_without_room_leaves_one_tier():
    made = plan(open_trace("zipf", SHAPE, 0), TREE, PROFILE, PROMPT)
    for capacity in (150, 1000, 10**6):
        alone = replay(made, Lru(), capacity, PROFILE, PROMPT)
        both = two_tiers(made, capacity, 0, policy=Lru)
        assert both.all == alone
        assert both.gpu_hit_rate == pytest.approx(alone.hit_rate)
        assert both.swapped_tokens == 0


@pytest.mark.parametrize("cost", GPU_COSTS)
def test_with_a_host_for_everything_each_entry_is_computed_and_swapped_out_once(cost):
    made = plan(open_trace("zipf", SHAPE, 0), TREE, PROFILE, PROMPT)
    fits = max(sum(made.tokens[e] for e in request) for request in made.requests)
    outcome = two_tiers(made, fits, 10**9, cost)
    accesses = [entry for request in made.requests for entry in request]
    assert outcome.all.hit_rate == pytest.approx(1 - len(set(accesses)) / len(accesses))
    assert outcome.gpu_hit_rate < outcome.all.hit_rate
    everything = sum(made.tokens[entry] for entry in set(accesses))
    assert everything - fits <= outcome.swapped_tokens <= everything
    free = replay_tiers(made, Pgdsf, Tiers(fits, 10**9, 0.0, cost), PROFILE, PROMPT)
    assert free.all.time_saved > outcome.all.time_saved, "loading is not free"


@pytest.mark.parametrize("cost", GPU_COSTS)
def test_two_tiers_stay_below_the_bound_of_both_together(cost):
    made = plan(open_trace("zipf-equal", SHAPE, 0), TREE, PROFILE, PROMPT)
    accesses = [entry for request in made.requests for entry in request]
    for gpu, host in ((300, 600), (400, 2000)):
        bound = most_hits(accesses, made.tokens, gpu + host) / len(accesses)
        assert 0 < two_tiers(made, gpu, host, cost).all.hit_rate <= bound


class Watched(Ranking):
    """Fails the moment that an entry leaves before its children do."""

    parents: tuple[int, ...] = ()

    def evict(self, group=None):
        victim = super().evict(group)
        assert all(self.parents[entry] != victim for entry in self._live), "a parent left before its child"
        return victim


@pytest.mark.parametrize("seed", range(3))
def test_nobody_leaves_before_its_children(monkeypatch, seed):
    made = plan(open_trace("zipf", SHAPE, seed), TREE, PROFILE, PROMPT)
    monkeypatch.setattr(Watched, "parents", made.parents)
    monkeypatch.setattr("benchmarks.eviction.tiers.Ranking", Watched)
    monkeypatch.setattr("benchmarks.eviction.replay.Ranking", Watched)
    assert replay(made, Pgdsf(), 500, PROFILE, PROMPT).hit_rate > 0
    assert two_tiers(made, 400, 1500).swapped_tokens > 400


def test_an_unknown_cost_is_refused():
    with pytest.raises(ValueError, match="known: prefill, reload, always-reload"):
        Tiers(1, 1, 0.0, "free")
