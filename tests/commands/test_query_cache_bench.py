"""The query-cache benchmark measures what it says and notices a wrong cache."""

from __future__ import annotations

import numpy as np
import pytest

from ragcachekit.commands.bench import query_cache
from ragcachekit.query.base import Hit
from ragcachekit.query.proximity import ProximityCache

KEYS = {
    "capacity",
    "tolerance",
    "hit_rate",
    "lookup_us",
    "latency_ms",
    "latency_ms_uncached",
    "result_recall",
}


def workload() -> np.ndarray:
    """Ten questions, each asked four times with a little noise, shuffled."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((10, 16))
    asked = np.repeat(base, 4, axis=0) + 1e-3 * rng.standard_normal((40, 16))
    return asked[rng.permutation(40)].astype(np.float32)


def search(question: np.ndarray) -> list[int]:
    return [int(np.sign(question[0])), 7, 9]


@pytest.mark.parametrize("eviction", ["fifo", "lru"])
@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_rows_of_a_sweep(metric: str, eviction: str) -> None:
    rows = query_cache.run(
        workload(), search, capacities=(2, 40), tolerances=(0.0, 0.05), metric=metric, eviction=eviction
    )
    assert all(set(row) == KEYS for row in rows)
    by_case = {(row["capacity"], row["tolerance"]): row for row in rows}
    assert by_case[40, 0.0]["hit_rate"] == 0.0
    assert by_case[40, 0.05]["hit_rate"] == 30 / 40
    assert by_case[2, 0.05]["hit_rate"] < 30 / 40
    assert by_case[40, 0.0]["result_recall"] == 1.0
    assert all(row["lookup_us"] > 0 and row["latency_ms"] > 0 for row in rows)


def test_recall_counts_what_the_index_would_have_said() -> None:
    asked = np.array([[1.0, 0.0], [1.0, 0.01]], np.float32)
    answers = {0.0: ["a", "b"], 0.01: ["b", "c"]}
    (row,) = query_cache.run(
        asked, lambda q: answers[round(float(q[1]), 2)], capacities=[1], tolerances=[0.5], metric="l2"
    )
    assert (row["hit_rate"], row["result_recall"]) == (0.5, 0.75)


def test_timings_come_with_their_spread() -> None:
    timings = query_cache.lookup_timings(capacities=[5], dims=[8], metrics=["l2"], lookups=20)
    assert [t.kind for t in timings] == ["miss", "near", "repeat"]
    for timing in timings:
        assert 0 < timing.lookup_us_min <= timing.lookup_us <= timing.lookup_us_max
    overhead = query_cache.wrapper_overhead(capacity=5, dim=64, calls=20)
    assert 0 < overhead.overhead_us_min <= overhead.overhead_us


class Wrong(ProximityCache):
    def lookup(self, embedding: object, *, partition: object) -> Hit | None:
        return Hit((1,), 0.0) if len(self) else None


class Blind(ProximityCache):
    def lookup(self, embedding: object, *, partition: object) -> Hit | None:
        return None


@pytest.mark.parametrize("kind", [Wrong, Blind])
def test_a_wrong_cache_reports_no_numbers(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_cache, "ProximityCache", kind)
    with pytest.raises(RuntimeError, match="the nearest key lies at"):
        query_cache.run(workload(), search, capacities=[8], tolerances=[0.05])
