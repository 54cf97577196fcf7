"""Loading or computing: formulas by hand, picks against trying everything, speeds from noisy reads."""

from __future__ import annotations

import itertools
import random

import pytest

from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.plan.load_planner import (
    LEAST_READS,
    TIE,
    Candidate,
    LoadPlanner,
    pipelined,
    pipelined_twice,
)
from ragcachekit.plan.row_cost import ScoringPass
from ragcachekit.plan.tier_speed import TierSpeed

LAYERS = 8


def linear(per_row, fixed=0.0):
    """A model whose prefill costs ``fixed + per_row * new``, whatever is cached."""
    return PrefillProfile([0, 10**6], [1, 10**6], [[fixed + per_row, fixed + per_row * 10**6]] * 2)


def planner(per_row, bandwidth, *, latency=0.0, readers=1, tier="disk"):
    made = LoadPlanner(linear(per_row), readers)
    for number in range(4 * LEAST_READS):
        nbytes = 1000 + 500 * (number % 7)
        made.observe_read(tier, nbytes, latency + nbytes / bandwidth)
    return made


def candidate(rows, nbytes=1000.0, reads=LAYERS, tier="disk"):
    return Candidate(tier, reads, nbytes, LAYERS, rows)


@pytest.mark.parametrize("load", [0.0, 0.3, 1.0, 2.5, 40.0])
@pytest.mark.parametrize("compute", [0.01, 1.0, 7.0])
@pytest.mark.parametrize("layers", [1, 2, 8, 31])
def test_pipelined_time_is_what_stepping_through_gives(load, compute, layers):
    done = 0.0
    for layer in range(layers):
        done = max(done, (layer + 1) * load / layers) + compute / layers
    assert pipelined(load, compute, layers) == pytest.approx(done)


def stepped(load, passes, layers):
    """Seconds of several passes, each ``(seconds, layers it runs through)``, layer by layer as they load."""
    done = 0.0
    for seconds, through in passes:
        for layer in range(through):
            done = max(done, (layer + 1) * load / layers) + seconds / through
    return done


@pytest.mark.parametrize("load", [0.0, 0.3, 1.0, 2.5, 40.0])
@pytest.mark.parametrize(("watch", "compute"), [(0.01, 1.0), (1.0, 1.0), (2.0, 7.0), (5.0, 0.1)])
@pytest.mark.parametrize(("layers", "seen"), [(1, 1), (8, 8), (8, 1), (31, 12)])
def test_two_passes_take_what_stepping_through_gives(load, watch, compute, layers, seen):
    expected = stepped(load, [(watch, seen), (compute, layers)], layers)
    assert pipelined_twice(load, watch, compute, layers, seen) == pytest.approx(expected)


class TestTierSpeed:
    @pytest.mark.parametrize(("latency", "bandwidth"), [(0.0, 1e6), (0.01, 1e8), (0.002, 5e9)])
    def test_latency_and_bandwidth_come_apart(self, latency, bandwidth):
        speed, rng = TierSpeed(), random.Random(1)
        for _ in range(300):
            nbytes, beside = rng.randrange(10**6, 10**7), rng.choice([0, 3 * 10**6])
            noise = rng.lognormvariate(0, 0.05)
            speed.observe(nbytes, (latency + (nbytes + beside) / bandwidth) * noise, beside)
        fitted, slope = speed.line()
        assert fitted == pytest.approx(latency, abs=0.15 * (latency + 5e6 / bandwidth))
        assert 1 / slope == pytest.approx(bandwidth, rel=0.2)

    def test_reads_of_one_size_are_put_down_to_bandwidth(self):
        speed = TierSpeed()
        for _ in range(20):
            speed.observe(1000, 0.5)
        assert speed.line() == (0.0, pytest.approx(1 / 2000))

    def test_it_follows_a_tier_that_changes(self):
        speed, rng = TierSpeed(), random.Random(2)
        for bandwidth in (1e9, 1e7):
            for _ in range(700):
                nbytes = rng.randrange(10**5, 10**6)
                speed.observe(nbytes, nbytes / bandwidth)
        assert 1 / speed.line()[1] == pytest.approx(1e7, rel=0.05)

    def test_a_single_read_moves_it_by_some_percent_only(self):
        speed = TierSpeed()
        for _ in range(100):
            speed.observe(1000, 0.5)
        speed.observe(1000, 5000.0)
        assert 0.5 < 1000 * speed.line()[1] < 0.6

    def test_never_negative(self):
        speed = TierSpeed()
        for nbytes, seconds in [(1000, 1.0), (9000, 0.1), (1000, 1.0), (9000, 0.1)]:
            speed.observe(nbytes, seconds)
        latency, slope = speed.line()
        assert latency > 0
        assert slope == 0.0

    def test_nothing_read_yet(self):
        assert TierSpeed().line() == (0.0, 0.0)


class TestChoice:
    def test_without_a_profile_or_a_known_tier_all_is_loaded(self):
        two = [candidate(10), candidate(20)]
        assert LoadPlanner().choose(two, 40, 10) == [True, True]
        assert LoadPlanner(linear(1e-9)).choose(two, 40, 10) == [True, True]
        elsewhere = planner(1e-9, 1.0, tier="redis")
        assert elsewhere.choose(two, 40, 10) == [True, True]

    def test_a_slow_tier_is_left_alone_and_a_fast_one_used(self):
        two = [candidate(100), candidate(200)]
        assert planner(1e-6, 100.0).choose(two, 310, 10) == [False, False]
        assert planner(1.0, 1e9).choose(two, 310, 10) == [True, True]

    def test_equal_times_compute(self):
        # One row costs as much as all reads: whichever way, 2 s of one beside nothing of the other.
        one = [candidate(1, nbytes=1000)]
        assert planner(1.0, 8000.0).choose(one, 1, 0) == [False]
        assert planner(1.0 * (1 + 20 * TIE), 8000.0).choose(one, 1, 0) == [True]

    def test_what_was_prefetched_already_costs_nothing(self):
        there = candidate(100, reads=0)
        assert planner(1e-6, 100.0).choose([there, candidate(100)], 210, 10) == [True, False]

    def test_several_readers_hide_latencies(self):
        two = [candidate(1), candidate(1)]
        alone, both = (planner(1.0, 1e12, latency=1.0, readers=readers) for readers in (1, 2))
        assert alone.load_seconds(two) == pytest.approx(16, rel=1e-3)
        assert both.load_seconds(two) == pytest.approx(8, rel=1e-3)
        assert both.load_seconds(two[:1]) == pytest.approx(8, rel=1e-3)

    @pytest.mark.parametrize("count", [1, 3, 6, 8])
    @pytest.mark.parametrize("seed", range(6))
    def test_against_all_subsets(self, count, seed):
        rng = random.Random(100 * count + seed)
        sizes = [rng.randrange(50, 900) for _ in range(count)]
        per_row, bandwidth = 10 ** rng.uniform(-5, -2), 10 ** rng.uniform(4, 7)
        chunks = [candidate(n, nbytes=64.0 * n) for n in sizes]
        picked = planner(per_row, bandwidth).choose(chunks, sum(sizes) + 30, 30)

        def seconds(loaded):
            load = sum(LAYERS * 64 * n for n, use in zip(sizes, loaded, strict=True) if use) / bandwidth
            compute = per_row * (30 + sum(n for n, use in zip(sizes, loaded, strict=True) if not use))
            return max(compute + load / LAYERS, load + compute / LAYERS)

        best = min(map(seconds, itertools.product([False, True], repeat=count)))
        assert seconds(picked) <= best * (1 + TIE) * 1.001

    @pytest.mark.parametrize("seed", range(4))
    def test_many_chunks_come_near_the_bound(self, seed):
        """With 30 chunks loading and computing can be balanced nearly perfectly; no way beats that."""
        rng = random.Random(seed)
        sizes = [rng.randrange(50, 900) for _ in range(30)]
        per_row, bandwidth = 1e-3, 64.0 * LAYERS * 10 ** rng.uniform(2.5, 3.5)
        chunks = [candidate(n, nbytes=64.0 * n) for n in sizes]
        picked = planner(per_row, bandwidth).choose(chunks, sum(sizes) + 30, 30)
        loaded = sum(n for n, use in zip(sizes, picked, strict=True) if use)
        load, compute = loaded * LAYERS * 64 / bandwidth, per_row * (30 + sum(sizes) - loaded)
        cost = LAYERS * 64 / bandwidth  # seconds to load a row
        balanced = per_row * (30 + sum(sizes)) / (per_row + cost)
        bound = min(balanced, sum(sizes)) * cost
        assert max(load, compute) <= max(bound, per_row * 30) * 1.03 + per_row * 30

    def test_observed_prefills_move_the_choice(self):
        made = planner(1e-4, 5e5)  # 16 ms to load, 10 ms to compute
        one = [candidate(100, nbytes=1000)]
        assert made.choose(one, 110, 10) == [False]
        before = made.profile.seconds(0, 110)
        for _ in range(50):
            made.observe_prefill(0, 110, 4 * before)
        assert made.profile.seconds(0, 110) == pytest.approx(4 * before, rel=0.05)
        assert made.choose(one, 110, 10) == [True]
        made.observe_prefill(0, 0, 1.0)  # no rows: nothing to learn
        assert made.choose(one, 110, 10) == [True]


class TestSlowSpells:
    """What a tier did once does not decide for ever."""

    ROWS, READ, NBYTES = 256, 0.0003, 1e5

    def request(self, made, read=READ, many=4):
        """How many of ``many`` chunks one request loads; their layers are read in ``read`` seconds each."""
        chunks = [candidate(self.ROWS, nbytes=self.NBYTES)] * many
        wanted = made.choose(chunks, many * self.ROWS + 32, 32)
        for _ in range(LAYERS * sum(wanted)):
            made.observe_read("disk", int(self.NBYTES), read)
        return sum(wanted)

    def known(self, per_row=1e-4):
        """Some 26 ms to compute a chunk, 2.4 ms to load it."""
        made = LoadPlanner(linear(per_row), 2)
        assert [self.request(made) for _ in range(20)] == [4] * 20
        return made

    @pytest.mark.parametrize("hang", [1.0, 29.0, 1e6])
    def test_one_read_that_hung_ends_no_loading(self, hang):
        made = self.known()
        made.observe_read("disk", int(self.NBYTES), hang)
        assert [self.request(made) for _ in range(20)] == [4] * 20

    @pytest.mark.parametrize("place", range(LEAST_READS))
    def test_nor_does_one_among_the_first_reads(self, place):
        made, reads = LoadPlanner(linear(1e-4), 2), [self.READ] * LEAST_READS
        reads[place] = 30.0
        for seconds in reads:
            made.observe_read("disk", int(self.NBYTES), seconds)
        assert [self.request(made) for _ in range(20)] == [4] * 20

    def test_a_tier_that_was_slow_for_long_is_tried_again(self):
        made = self.known()
        for _ in range(2000):
            made.observe_read("disk", int(self.NBYTES), 0.1)
        assert self.request(made) == 0
        assert [self.request(made) for _ in range(3000)][-20:] == [4] * 20

    def test_trying_a_slow_tier_costs_little(self):
        """0.8 s to load what is computed in 0.1 s, in every one of 5,000 requests."""
        made = self.known()
        for _ in range(2000):
            made.observe_read("disk", int(self.NBYTES), 0.1)
        tried = sum(self.request(made, read=0.1) for _ in range(5000))
        assert tried > 5
        assert tried * LAYERS * 0.1 < 0.03 * 5000 * 1e-4 * (4 * self.ROWS + 32)

    def test_where_both_ways_take_as_long_few_are_tried(self):
        made = LoadPlanner(linear(1e-4), 1)
        read = 1e-4 * self.ROWS / LAYERS * 1.2
        for _ in range(100):
            made.observe_read("disk", int(self.NBYTES), read)
        found = [self.request(made, read, many=1) for _ in range(300)]
        assert found[0] == 0
        assert 0 < sum(found) <= 300 / 16

    def test_prefetching_measures_as_well(self):
        made = self.known()
        for _ in range(2000):
            made.observe_read("disk", int(self.NBYTES), 0.1)
        for _ in range(3000):
            assert self.request(made, read=0.1) == 0
            made.observe_read("disk", int(self.NBYTES), 0.1)


class TestGuidedChoice:
    """Policies that watch the question run it over the linked cache once before the forward."""

    ONE = (candidate(100),)

    def fixed(self, read=0.002):
        """50 ms a forward and 0.1 ms a row; eight reads, of 16 ms together."""
        made = LoadPlanner(linear(1e-4, fixed=0.05))
        for _ in range(LEAST_READS):
            made.observe_read("disk", 1000, read)
        return made

    def test_a_second_pass_can_make_loading_the_slower_way(self):
        # Loaded: 62 ms in one pass, 122 in two. Computed: 70.
        made = self.fixed()
        plain, guided = (made.choose(self.ONE, 200, 100, guide) for guide in (None, ScoringPass(100)))
        assert (plain, guided) == ([True], [False])

    def test_a_pass_that_runs_in_any_case_decides_nothing_by_itself(self):
        made = self.fixed()
        assert made.choose(self.ONE, 200, 100, ScoringPass(100, always=True)) == [True]

    def test_exact_entries_need_no_pass(self):
        made = self.fixed()
        exact = Candidate("disk", LAYERS, 1000.0, LAYERS, 100, is_exact=True)
        assert made.choose([exact], 200, 100, ScoringPass(100)) == [True]

    def test_a_pass_over_few_layers_costs_little(self):
        made = self.fixed(read=0.0001)
        # Computing all: 70 ms. An eighth of the pass is 7.5 ms, on top of 60; all but one are 52.5.
        few, all_but_one = ScoringPass(100, watched=(0,)), ScoringPass(100, watched=(-2, 1))
        assert (few.layers(LAYERS), all_but_one.layers(LAYERS), ScoringPass(1).layers(LAYERS)) == (1, 7, 8)
        assert made.choose(self.ONE, 200, 100, few) == [True]
        assert made.choose(self.ONE, 200, 100, all_but_one) == [False]

    def test_what_is_recomputed_is_not_spared(self):
        half = Candidate("disk", LAYERS, 1000.0, LAYERS, 50, recomputed=50)
        made = planner(1e-4, 8000 / 9.6e-3)  # 9.6 ms to load, 10.1 to compute all, 5.1 to compute half
        assert made.choose([candidate(100)], 101, 1) == [True]
        assert made.choose([half], 101, 1) == [False]

    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize("seen", [LAYERS, 3])
    def test_against_all_subsets_of_two_passes(self, seed, seen):
        rng = random.Random(seed)
        sizes = [rng.randrange(50, 900) for _ in range(5)]
        again = [rng.randrange(n // 2) for n in sizes]
        question, per_row, fixed = (
            rng.randrange(5, 400),
            10 ** rng.uniform(-5, -3),
            rng.choice([0.0, 0.01, 0.2]),
        )
        bandwidth, is_exact = 10 ** rng.uniform(5, 8), rng.randrange(-5, 5)
        made = LoadPlanner(linear(per_row, fixed))
        for nbytes in range(1000, 9000, 1000):
            made.observe_read("disk", nbytes, nbytes / bandwidth)
        chunks = [
            Candidate("disk", LAYERS, 64.0 * n, LAYERS, n - r, r, is_exact=i == is_exact)
            for i, (n, r) in enumerate(zip(sizes, again, strict=True))
        ]
        total = question + sum(sizes)
        picked = made.choose(chunks, total, question, ScoringPass(question, watched=(seen - 1,)))

        def seconds(loaded):
            uses = list(zip(sizes, again, loaded, strict=True))
            load = sum(LAYERS * 64 * n for n, _, use in uses if use) / bandwidth
            first = question + sum(n for n, _, use in uses if not use)
            forward = (fixed + per_row * (first + sum(r for _, r, use in uses if use)), LAYERS)
            watches = any(use for i, use in enumerate(loaded) if i != is_exact)
            watch = ((fixed + per_row * first) * seen / LAYERS, seen)
            return stepped(load, [watch, forward] if watches else [forward], LAYERS)

        best = min(map(seconds, itertools.product([False, True], repeat=len(sizes))))
        assert seconds(picked) <= best * (1 + TIE) * 1.001


@pytest.mark.parametrize("read", range(LAYERS))
@pytest.mark.parametrize("ratio", [0.3, 0.9, 1.1, 2.0, 7.5])
def test_a_prefill_may_begin_once_so_many_layers_are_read_that_it_waits_for_none(read, ratio):
    """L_p of Cache-Craft section 3.4, by stepping through the layers that are left."""
    rows, bandwidth, nbytes = 100, 1e6, 1000.0
    layer = nbytes / bandwidth
    compute = LAYERS * layer / ratio
    made = planner(compute / rows, bandwidth)
    left = [candidate(50, nbytes, LAYERS - read)]
    arrivals = [(number - read + 1) * layer for number in range(read, LAYERS)]
    waits = any(at > number * compute / LAYERS for number, at in enumerate(arrivals, read))
    assert made.hides(left, 0, rows) is not waits


def test_without_times_nothing_is_waited_for():
    assert LoadPlanner().hides([candidate(50)], 0, 10)
    assert LoadPlanner(linear(1e-9)).hides([candidate(50)], 0, 10)
    assert planner(1e-9, 1e6).hides([], 0, 10)
    assert not planner(1e-9, 1e6).hides([candidate(50)], 0, 10)
