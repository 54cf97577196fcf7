"""Times to the first token, by hand: one millisecond per computed token."""

import pytest

from ragcachekit.commands.estimate.replay import Request, Served, Use
from ragcachekit.commands.estimate.speed import Speeds
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.plan.row_cost import row_cost_of
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.policies.registry import open_policy
from ragcachekit.types import KVKey

LAYERS = 4
LINEAR = PrefillProfile([0, 1000], [1, 1000], [[0.001, 1.0], [0.001, 1.0]])


@pytest.fixture
def seconds():
    """500 tokens: 20 of an exact prefix, chunks of 200, 100 and 100, and a question of 80.

    KV of 8 bytes per token and layer.
    """

    def use(policy, start, tokens, exact=False):
        name = "prefix" if exact else "standalone"
        key = KVKey("f", "n", f"chunk at {start}", name)
        cost = row_cost_of(policy, PlacedChunk(key.chunk_id, start, tokens, exact), LAYERS)
        return Use(key, tokens, 8 * LAYERS * tokens, cost)

    def of(name, *tiers, disk=1e15, copy=1e15):
        policy = open_policy(name)
        chunks = (use(policy, start, tokens) for start, tokens in ((20, 200), (220, 100), (320, 100)))
        request = Request(500, (use(policy, 0, 20, exact=True), *chunks), None)
        return Speeds(LINEAR, disk, copy, LAYERS, "").served(Served(request, tiers), policy)

    return of


def test_nothing_cached_is_a_full_prefill(seconds):
    assert seconds("lego:16", *["computed"] * 4) == pytest.approx(0.500)


@pytest.mark.parametrize(
    ("policy", "tiers", "rows"),
    [
        ("reuse", ["host"] * 4, 80),
        ("lego:16", ["host"] * 4, 80 + 3 * 16),
        ("query:0.15", ["host"] * 4, 80 + 80 + 60),  # the question's rows once before, to watch them
        ("query:0.15", ["host", "computed", "host", "host"], 2 * (80 + 200) + 30),
        ("query:0.15", ["host", "computed", "computed", "computed"], 480),  # nothing to choose from
        ("random:0.1", ["host"] * 4, 80 + 40),
        ("lego:16", ["host", "host", "computed", "host"], 80 + 100 + 2 * 16),
        ("lego:16", ["computed", "computed", "host", "computed"], 400 + 16),
        ("lego:16", ["host", "disk", "disk", "disk"], 80 + 3 * 16),
    ],
)
def test_what_is_computed_takes_its_time(seconds, policy, tiers, rows):
    assert seconds(policy, *tiers) == pytest.approx(rows * 1e-3, rel=1e-6)


def test_loading_is_hidden_behind_computing(seconds):
    """400 tokens of 32 bytes at 128 KB/s take 100 ms, 128 rows 128 ms: one layer's load is waited for."""
    assert seconds("lego:16", "host", "disk", "disk", "disk", disk=128e3) == pytest.approx(0.128 + 0.025)


def test_watching_waits_for_loads_and_computing_behind_it_does_not(seconds):
    """100 ms of loads, 80 ms of watching, whose last layer begins when all is there; then 140 ms."""
    assert seconds("query:0.15", "host", "disk", "disk", "disk", disk=128e3) == pytest.approx(
        0.100 + 0.080 / LAYERS + 0.140
    )


def test_a_disk_slower_than_the_model_is_not_read(seconds):
    """32 bytes per token: at 10 KB/s a token takes 3.2 ms to load and 1 ms to compute."""
    assert seconds("lego:16", "host", "disk", "host", "host", disk=1e4) == pytest.approx(
        (80 + 200 + 2 * 16) * 1e-3
    )


def test_putting_kv_into_place_counts(seconds):
    """420 tokens of 32 bytes at 1 MB/s."""
    assert seconds("reuse", *["host"] * 4, copy=1e6) == pytest.approx(0.080 + 420 * 32 / 1e6)
