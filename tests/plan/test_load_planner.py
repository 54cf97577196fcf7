"""Loading or computing: formulas by hand, choices against trying every set, rates from noisy reads."""

import itertools
import random
from types import SimpleNamespace

import pytest

from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.plan.load_planner import MIN_READS, TIE, LoadPlanner, ReadRate, pipelined, recomputed_rows
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.policies.registry import open_policy

LAYERS = 8


def over(*profile):
    return LoadPlanner(SimpleNamespace(profile=PrefillProfile(*profile)))


def planner(per_row, bandwidth, *, tier="disk", fixed=0.0):
    made = over(fixed, per_row)
    for number in range(4 * MIN_READS):
        nbytes = 1000 + 500 * (number % 7)
        made.observe_read(tier, nbytes, nbytes / bandwidth)
    return made


def entry(nbytes=1000.0, tier="disk", ready=0):
    """An opened entry whose layers have ``nbytes`` each."""
    return SimpleNamespace(tier=tier, layers=LAYERS, ready=ready, nbytes=nbytes * LAYERS)


@pytest.mark.parametrize("load", [0.0, 0.3, 1.0, 2.5, 40.0])
@pytest.mark.parametrize("compute", [0.01, 1.0, 7.0])
@pytest.mark.parametrize("layers", [1, 2, 8, 31])
def test_pipelined_time_is_what_stepping_through_gives(load, compute, layers):
    done = 0.0
    for layer in range(layers):
        done = max(done, (layer + 1) * load / layers) + compute / layers
    assert pipelined(load, compute, layers) == pytest.approx(done)


def test_nothing_is_known_at_first_and_everything_is_loaded():
    made = over(0.0, 1e-9)
    assert made.choose([entry()], [10], 20, 5) == [True]
    assert made.hides([entry()], 10, 5)
    for number in range(MIN_READS):
        assert made.choose([entry()], [10], 20, 5) == [True], number
        made.observe_read("disk", 1000, 1.0)
    assert made.choose([entry()], [10], 20, 5) == [False]
    assert made.choose([entry(), entry(tier="bulk")], [10, 10], 30, 5) == [True, True], "bulk is unknown"
    made.cost.profile = None
    assert made.choose([entry()], [10], 20, 5) == [True]
    assert made.choose([], [], 20, 5) == []


@pytest.mark.parametrize("seed", range(12))
def test_no_set_ends_the_prefill_much_sooner(seed):
    """Against every subset: entries of like size per row are chosen as well as by trying everything."""
    rng = random.Random(seed)
    per_row, bandwidth = 10 ** rng.uniform(-5, -3), 10 ** rng.uniform(6, 8)
    made = planner(per_row, bandwidth, fixed=rng.choice([0.0, 0.01]))
    rows = [rng.randint(10, 600) for _ in range(rng.randint(1, 7))]
    entries = [entry(n * 1000.0) for n in rows]
    computed = 40 + sum(n // 10 for n in rows)
    total = computed + sum(rows)

    def end(loaded):
        load = sum(one.nbytes for i, one in enumerate(entries) if i in loaded) / bandwidth
        again = computed + sum(n for i, n in enumerate(rows) if i not in loaded)
        return pipelined(load, made.cost.profile.seconds(total - again, again), LAYERS)

    chosen = made.choose(entries, rows, total, computed)
    everything = [
        end(set(some))
        for count in range(len(rows) + 1)
        for some in itertools.combinations(range(len(rows)), count)
    ]
    assert end({i for i, load in enumerate(chosen) if load}) <= min(everything) * 1.25
    for way in (set(), set(range(len(rows)))):
        assert end({i for i, load in enumerate(chosen) if load}) <= end(way) * (1 + TIE) + 1e-12


def test_of_equal_times_the_one_that_computes_more():
    made = planner(1e-3, 1e6)
    # 8 ms to load, 8 ms to compute
    assert made.choose([entry()], [8], 1000, 900) == [False], "it hides behind the rest either way"


def test_a_slow_tier_is_left_and_a_fast_one_used():
    made = planner(1e-4, 1e9)
    for _ in range(MIN_READS):
        made.observe_read("bulk", 1000, 1.0)
    assert made.choose([entry(), entry(tier="bulk")], [500, 500], 1100, 100) == [True, False]


def test_the_prefill_starts_when_the_reads_no_longer_hold_it_up():
    """L_p of Cache-Craft section 3.4: ceil((L - 1)(1 - T_prefill / T_load)) + 1 layers are read by then."""
    made = planner(1e-3, 1e6)
    compute, per_layer = made.cost.profile.seconds(0, 40), 10_000 / 1e6
    load = LAYERS * per_layer
    needed = -(-(LAYERS - 1) * (1 - compute / load) // 1) + 1
    for read in range(LAYERS + 1):
        there = made.hides([entry(10_000.0, ready=read)], 0, 40)
        assert there == (read >= 1 and (LAYERS - read) * per_layer <= compute * (LAYERS - 1) / LAYERS)
        assert not there or read >= needed - 1


def test_a_rate_follows_and_one_hung_read_says_little():
    rate, rng = ReadRate(), random.Random(1)
    for _ in range(200):
        rate.observe(1000, 1e-3 * rng.uniform(0.7, 1.3))
    assert rate.seconds(1000) == pytest.approx(1e-3, rel=0.1)
    rate.observe(1000, 60.0)
    assert rate.seconds(1000) < 1.2e-3
    for _ in range(400):
        rate.observe(1000, 1e-4)
    assert rate.seconds(1000) == pytest.approx(1e-4, rel=0.2)


def test_reads_at_the_same_time_share_the_bandwidth():
    rate = ReadRate()
    for _ in range(20):
        rate.observe(1000, 2e-3, 1000)
    assert rate.seconds(1000) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [
        ("reuse", 0),
        ("lego:16", 16),
        ("lego:99", 40),
        ("query:0.15", 6),
        ("deep:0.5", 20),
        ("cacheblend:0.2", 0),
    ],
)
def test_rows_that_a_policy_recomputes(policy, recomputed):
    assert recomputed_rows(open_policy(policy), PlacedChunk("open", 7, 40, False), 4) == recomputed
    assert recomputed_rows(open_policy(policy), PlacedChunk("exact", 0, 40, True), 4) == 0
