"""Loading or computing: formulas by hand, choices against trying every set, rates from noisy reads."""

from __future__ import annotations

import itertools
import random

import pytest

from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.plan.load_planner import MIN_READS, TIE, Candidate, LoadPlanner, ReadRate, pipelined

LAYERS = 8


def planner(per_row, bandwidth, *, tier="disk", fixed=0.0):
    made = LoadPlanner(PrefillProfile(fixed, per_row))
    for number in range(4 * MIN_READS):
        nbytes = 1000 + 500 * (number % 7)
        made.observe_read(tier, nbytes, nbytes / bandwidth)
    return made


def candidate(rows, nbytes=1000.0, reads=LAYERS, tier="disk", recomputed=0):
    return Candidate(tier, reads, nbytes, LAYERS, rows, recomputed)


@pytest.mark.parametrize("load", [0.0, 0.3, 1.0, 2.5, 40.0])
@pytest.mark.parametrize("compute", [0.01, 1.0, 7.0])
@pytest.mark.parametrize("layers", [1, 2, 8, 31])
def test_pipelined_time_is_what_stepping_through_gives(load, compute, layers):
    done = 0.0
    for layer in range(layers):
        done = max(done, (layer + 1) * load / layers) + compute / layers
    assert pipelined(load, compute, layers) == pytest.approx(done)


def test_nothing_is_known_at_first_and_everything_is_loaded():
    made = LoadPlanner(PrefillProfile(0.0, 1e-9))
    assert made.choose([candidate(10)], 20, 5) == [True]
    assert made.hides([candidate(10)], 10, 5)
    for number in range(MIN_READS):
        assert made.choose([candidate(10)], 20, 5) == [True], number
        made.observe_read("disk", 1000, 1.0)
    assert made.choose([candidate(10)], 20, 5) == [False]
    assert made.choose([candidate(10), candidate(10, tier="bulk")], 30, 5) == [True, True], "bulk is unknown"
    made.profile = None
    assert made.choose([candidate(10)], 20, 5) == [True]
    assert made.choose([], 20, 5) == []


@pytest.mark.parametrize("seed", range(12))
def test_no_set_ends_the_prefill_much_sooner(seed):
    """Against every subset: entries of like size per row are chosen as well as by trying everything."""
    rng = random.Random(seed)
    per_row, bandwidth = 10 ** rng.uniform(-5, -3), 10 ** rng.uniform(6, 8)
    made = planner(per_row, bandwidth, fixed=rng.choice([0.0, 0.01]))
    rows = [rng.randint(10, 600) for _ in range(rng.randint(1, 7))]
    candidates = [candidate(n, nbytes=n * 1000.0, recomputed=n // 10) for n in rows]
    computed, total = 40, 40 + sum(rows) + sum(n // 10 for n in rows)

    def end(loaded):
        load = sum(LAYERS * c.nbytes for i, c in enumerate(candidates) if i in loaded) / bandwidth
        again = computed + sum(c.recomputed for c in candidates)
        again += sum(c.rows for i, c in enumerate(candidates) if i not in loaded)
        return pipelined(load, made.profile.seconds(total - again, again), LAYERS)

    chosen = made.choose(candidates, total, computed)
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
    same = candidate(8, nbytes=1000.0)  # 8 ms to load, 8 ms to compute
    assert made.choose([same], 1000, 900) == [False], "it hides behind the rest either way"


def test_a_slow_tier_is_left_and_a_fast_one_used():
    made = planner(1e-4, 1e9)
    for _ in range(MIN_READS):
        made.observe_read("bulk", 1000, 1.0)
    assert made.choose([candidate(500), candidate(500, tier="bulk")], 1100, 100) == [True, False]


def test_the_prefill_starts_when_the_reads_no_longer_hold_it_up():
    """L_p of Cache-Craft section 3.4: ceil((L - 1)(1 - T_prefill / T_load)) + 1 layers are read by then."""
    made = planner(1e-3, 1e6)
    compute, per_layer = made.profile.seconds(0, 40), 10_000 / 1e6
    load = LAYERS * per_layer
    needed = -(-(LAYERS - 1) * (1 - compute / load) // 1) + 1
    for read in range(LAYERS + 1):
        there = made.hides([candidate(100, nbytes=10_000.0, reads=LAYERS - read)], 0, 40)
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


def test_prefills_that_were_observed_scale_the_estimate():
    made = planner(1e-3, 1e6)
    for _ in range(100):
        made.observe_prefill(0, 100, 0.3)
    assert made.profile.seconds(0, 100) == pytest.approx(0.3, rel=0.01)
    made.observe_prefill(0, 0, 0.3)
