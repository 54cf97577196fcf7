"""The query-cache benchmark measures what it says."""

from __future__ import annotations

import numpy as np

from ragcachekit.commands.bench import query_cache

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


def test_rows_of_a_sweep() -> None:
    rows = query_cache.sweep(workload(), search, capacities=(2, 40), tolerances=(0.0, 0.05))
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
    (row,) = query_cache.sweep(asked, lambda q: answers[round(float(q[1]), 2)], [1], [0.5])
    assert (row["hit_rate"], row["result_recall"]) == (0.5, 0.75)
