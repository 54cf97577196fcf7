"""Times of prefills between, at and beyond measured points."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcachekit.model.prefill_profile import MOST_DRIFT, PrefillProfile
from ragcachekit.model.prefill_timing import extended

CACHED, NEW = (0, 100, 400), (1, 50, 200, 1000)
TABLE = [[2.0 + 0.01 * n + 1e-5 * n * (c + n / 2) for n in NEW] for c in CACHED]
LLAMA_8B = {"layers": 32, "hidden": 4096, "inter": 14336, "heads": 32, "kv_heads": 8}


@pytest.fixture
def profile():
    return PrefillProfile(CACHED, NEW, TABLE)


def test_measured_points_come_back(profile):
    for (i, c), (j, n) in itertools.product(enumerate(CACHED), enumerate(NEW)):
        assert profile.seconds(c, n) == pytest.approx(TABLE[i][j])


def test_between_the_points_it_is_bilinear(profile):
    """NumPy's interpolation along one axis, and of its results along the other, is the oracle."""
    draw = random.Random(0)
    for _ in range(300):
        cached, new = draw.uniform(0, 400), draw.uniform(1, 1000)
        oracle = np.interp(cached, CACHED, [np.interp(new, NEW, row) for row in TABLE])
        assert profile.seconds(cached, new) == pytest.approx(oracle)


def test_beyond_the_points_the_last_slopes_go_on(profile):
    slope = (TABLE[2][3] - TABLE[2][2]) / 800
    assert profile.seconds(400, 3000) == pytest.approx(TABLE[2][3] + 2000 * slope)
    slope = (TABLE[2][1] - TABLE[1][1]) / 300
    assert profile.seconds(1000, 50) == pytest.approx(TABLE[2][1] + 600 * slope)
    assert profile.seconds(0, 0) == 0


times = st.floats(1e-6, 1e3)
counts = st.floats(0, 5000)


@given(st.data(), st.lists(st.lists(times, min_size=4, max_size=4), min_size=3, max_size=3))
def test_more_tokens_never_take_less_time_whatever_was_measured(data, table):
    profile = PrefillProfile(CACHED, data.draw(st.sampled_from([NEW, (20, 50, 200, 1000)])), table)
    cached, new = data.draw(counts), data.draw(counts)
    more_cached, more_new = cached + data.draw(counts), new + data.draw(counts)
    now = profile.seconds(cached, new)
    assert now >= 0
    assert profile.seconds(more_cached, new) >= now * (1 - 1e-9)
    assert profile.seconds(cached, more_new) >= now * (1 - 1e-9)


def test_one_point_is_a_profile_too():
    profile = PrefillProfile([0], [10], [[0.5]])
    assert (profile.seconds(7, 3), profile.seconds(0, 10), profile.seconds(99, 50)) == (0.5, 0.5, 0.5)


def test_measured_points_count_by_their_median():
    points = [(c, n, t) for c in (0, 8) for n in (4, 16) for t in (1.0 * n, 2.0 * n, 90.0 * n)]
    profile = extended(points)
    assert (profile.seconds(0, 4), profile.seconds(8, 16)) == (8, 32)


def test_what_is_observed_scales_everything_slowly_and_within_bounds(profile):
    before = profile.seconds(50, 500)
    profile.observed(100, 50, 3 * profile.seconds(100, 50))
    assert 1.05 < profile.scale < 1.3, "one slow prefill is not a slow machine"
    assert profile.seconds(50, 500) == pytest.approx(before * profile.scale)
    for _ in range(200):
        profile.observed(100, 50, 3 * TABLE[1][1])
    assert profile.scale == pytest.approx(3, rel=1e-3)
    for _ in range(500):
        profile.observed(100, 50, 1e6)
    assert profile.scale == pytest.approx(MOST_DRIFT)
    for _ in range(500):
        profile.observed(100, 50, 1e-9)
    assert profile.scale == pytest.approx(1 / MOST_DRIFT)


def test_json_keeps_all_of_it(profile):
    profile.observed(0, 200, 9.0)
    again = PrefillProfile.from_json(profile.to_json())
    for cached, new in ((0, 1), (250, 37), (9000, 9000)):
        assert again.seconds(cached, new) == profile.seconds(cached, new)
    assert again.to_json() == profile.to_json()


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"schema": 1}', '{"schema": 0}', '{"schema": 1, "cached": 3}', "no"]
)
def test_anything_else_is_no_profile(text):
    with pytest.raises(ValueError, match=r"profile|Expecting value"):
        PrefillProfile.from_json(text)


def test_damaged_times_are_refused(profile):
    frame = json.loads(profile.to_json())
    frame["seconds"][0][0] = -1.0
    with pytest.raises(ValueError, match="positive"):
        PrefillProfile.from_json(json.dumps(frame))


@pytest.mark.parametrize(
    ("cached", "new", "table", "says"),
    [
        ([0, 0], [1, 2], np.ones((2, 2)), "cached token counts must ascend"),
        ([0], [0, 2], np.ones((1, 2)), "new token counts must ascend from 1"),
        ([], [1], np.ones((0, 1)), "cached token counts"),
        ([0], [1], np.ones((1, 2)), "one row per cached"),
        ([0], [1], [[float("nan")]], "positive number"),
    ],
)
def test_a_bad_table_is_refused(cached, new, table, says):
    with pytest.raises(ValueError, match=says):
        PrefillProfile(cached, new, table)


def test_bad_counts_and_times_are_refused(profile):
    with pytest.raises(ValueError, match=">= 0"):
        profile.seconds(-1, 5)
    for cached, new, seconds in ((0, 0, 1.0), (0, 5, 0.0), (0, 5, float("inf")), (-1, 5, 1.0)):
        with pytest.raises(ValueError, match="no prefill"):
            profile.observed(cached, new, seconds)
    with pytest.raises(ValueError, match="scale"):
        PrefillProfile([0], [1], [[1.0]], scale=0)


def test_a_shape_costs_two_operations_per_weight_and_attention_grows_with_what_is_cached():
    """Llama 3.1 8B has 6.98e9 weights in its layers; its attention spends 4 x 4096 x 32 per pair."""
    profile = PrefillProfile.of_shape(
        **LLAMA_8B, flops_per_second=1e12, bytes_per_second=1e12, bytes_per_weight=2
    )
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert weights == pytest.approx(6.98e9, rel=0.01)
    pairs = 1024 * (4096 + 512)
    flops = 2 * weights * 1024 + 4 * 4096 * 32 * pairs
    assert profile.seconds(4096, 1024) == pytest.approx(flops / 1e12)
    slow_memory = PrefillProfile.of_shape(**LLAMA_8B, flops_per_second=1e20, bytes_per_second=1e9)
    assert slow_memory.seconds(0, 5) == pytest.approx(2 * weights / 1e9), "reading the weights is the floor"
