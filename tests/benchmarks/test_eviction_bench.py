"""Replays against a simulator that keeps plain dicts and looks at every entry at every eviction."""

import json
import statistics

import pytest

from benchmarks.eviction.bounds import most_hits, most_token_hits
from benchmarks.eviction.replay import CHUNKS, PROFILE, QUESTION, SYSTEM, TREE, plan, replay
from benchmarks.eviction.run import EvictionSettings, run
from benchmarks.eviction.traces import TRACES, Trace, TraceShape, open_trace
from ragcachekit.store.eviction import POLICIES, Lru, open_eviction

SHAPE = TraceShape(documents=60, requests=300, top_k=3, mean_tokens=100)
CELL = ("trace", "structure", "capacity_share")
TINY = ("eviction", "--documents", "60", "--requests", "120", "--seeds", "2", "--sizes", "0.05,0.1")


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
        new = QUESTION + sum(sizes.values()) - cached
        spent = PROFILE.seconds(SYSTEM + cached, new)
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
        outcome = replay(plan(trace, structure), open_eviction(policy), capacity)
        hits, tokens, seconds = plain(trace, capacity, policy, tree=structure == TREE)
        asked = [doc for request in trace.requests for doc in request]
        full = sum(
            PROFILE.seconds(SYSTEM, QUESTION + sum(trace.tokens[doc] for doc in request))
            for request in trace.requests
        )
        assert outcome.hit_rate == pytest.approx(hits / len(asked))
        assert outcome.token_hit_rate == pytest.approx(tokens / sum(trace.tokens[doc] for doc in asked))
        assert outcome.time_saved == pytest.approx(1 - seconds / full)


def test_by_hand():
    """[1, 2] then [1, 3]: one of two documents hits, as in the paper's example."""
    trace = Trace("hand", (10, 10, 10, 10), ((1, 2), (1, 3), (2, 1), (1, 2)), 40)
    outcome = replay(plan(trace, TREE), Lru(), 1000)
    assert outcome.hit_rate == 3 / 8
    assert outcome.request_hit_rate == 1 / 4
    flat = replay(plan(trace, CHUNKS), Lru(), 1000)
    assert flat.hit_rate == 5 / 8
    assert flat.request_hit_rate == 2 / 4


@pytest.mark.parametrize("structure", [TREE, CHUNKS])
@pytest.mark.parametrize("name", TRACES)
def test_no_policy_exceeds_the_bounds(name, structure):
    made = plan(open_trace(name, SHAPE, 1), structure)
    accesses = [entry for request in made.requests for entry in request]
    asked = sum(made.tokens[entry] for entry in accesses)
    for capacity in (200, 1000, 4000):
        hits = most_hits(accesses, made.tokens, capacity) / len(accesses)
        tokens = most_token_hits(accesses, made.tokens, capacity) / asked
        for policy in POLICIES:
            outcome = replay(made, open_eviction(policy), capacity)
            assert 0 < outcome.hit_rate <= hits
            assert outcome.token_hit_rate <= tokens
            assert outcome.request_hit_rate <= outcome.hit_rate


@pytest.fixture(scope="module")
def report():
    shape = TraceShape(documents=80, requests=200, mean_tokens=300)
    shares, policies = (0.02, 0.1), ("lru", "pgdsf")
    return run(EvictionSettings(("zipf", "zipf-equal"), None, policies, shares, seeds=3, shape=shape))


def test_rows_are_medians_over_the_seeds_and_ratios_are_paired(report):
    assert len(report.rows) == 2 * 2 * 2 * 2
    for row in report.rows:
        assert 0 <= row["hit_rate_min"] <= row["hit_rate"] <= row["hit_rate_max"] <= row["belady_hit_rate"]
        assert row["time_saved_min"] <= row["time_saved"] <= row["time_saved_max"]
        assert row["token_hit_rate"] <= row["belady_token_hit_rate"]
        assert row["bound"] == ("MIN" if row["trace"] == "zipf-equal" else "PFOO-L")
    found = {"lru": [], "pgdsf": []}
    for seed in range(3):
        trace = open_trace("zipf", TraceShape(documents=80, requests=200, mean_tokens=300), seed)
        for policy, outcomes in found.items():
            made = plan(trace, "chunks")
            outcomes.append(replay(made, open_eviction(policy), int(0.1 * trace.corpus_tokens)))
    (row,) = [
        row
        for row in report.rows
        if (*(row[name] for name in CELL), row["policy"]) == ("zipf", "chunks", 0.1, "lru")
    ]
    rates = [outcome.hit_rate for outcome in found["lru"]]
    assert row["hit_rate"] == statistics.median(rates)
    assert (row["hit_rate_min"], row["hit_rate_max"]) == (min(rates), max(rates))
    ratios = [a.time_saved / b.time_saved for a, b in zip(found["pgdsf"], found["lru"], strict=True)]
    assert row["pgdsf_time_ratio"] == statistics.median(ratios)


def test_pgdsf_finds_more_than_lru_and_gdsf_where_popularity_is_skewed():
    shape = TraceShape(documents=200, requests=800)
    rows = run(EvictionSettings(("zipf-equal",), shares=(0.04,), seeds=2, shape=shape)).rows
    assert all(row["pgdsf_hit_ratio"] > 1.03 for row in rows if row["policy"] == "lru")
    assert all(row["pgdsf_hit_ratio"] > 1 for row in rows if row["policy"] == "gdsf")


def test_the_command_replays_a_trace_of_the_users(proofs, tmp_path):
    trace, out = tmp_path / "asked.jsonl", tmp_path / "e.json"
    lines = [
        {"docs": [f"doc {n % 7}", {"id": f"doc {n % 3 + 7}", "tokens": 50 * (n % 3 + 1)}]} for n in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ("--tokens", "200", "--sizes", "0.5", "--structure", "chunks", "--policies", "lru,pgdsf:50")
    result = proofs("eviction", "--trace", trace, *options, "--json", out, "--plot", tmp_path / "e.png")
    assert result.exit_code == 0, result.output
    assert "Documents found" in result.output
    rows = json.loads(out.read_text())["rows"]
    found = [(row["trace"], row["policy"], row["seeds"]) for row in rows]
    assert found == [("asked", "lru", 1), ("asked", "pgdsf:50", 1)]
    assert rows[0]["capacity"] == (7 * 200 + 50 + 100 + 150) // 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--traces", "zipf", "--trace", "x.jsonl"), "not both"),
        (("--traces", "uniform"), "known: zipf"),
        (("--policies", "mru"), "known: lru"),
        (("--sizes", "small"), "as 0.01,0.04"),
        (("--sizes", "1.5"), "above 0 up to 1"),
        (("--structure", "list"), "known: tree, chunks"),
        (("--trace", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_is_one_line(proofs, arguments, says):
    result = proofs(*TINY[:-2], *arguments)
    assert result.exit_code == 2
    assert says in result.output
