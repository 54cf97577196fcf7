"""Bounds by leading columns: no key within the tolerance is ever excluded, and they are given up in time."""

from __future__ import annotations

import numpy as np
import pytest

from ragcachekit.query.keys.leading import LEADING_COLUMNS, LeadingColumns
from ragcachekit.query.keys.matrix import KeyMatrix
from ragcachekit.query.keys.vectors import Query, checked, exact_bytes
from ragcachekit.query.metrics import get_metric

DIM, KEYS = 768, 200


def exact(metric: str, q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    q, keys = q.astype(np.longdouble), keys.astype(np.longdouble)
    if metric == "l2":
        return np.sqrt(((keys - q) ** 2).sum(axis=1))
    squares = (keys * keys).sum(axis=1)
    if metric == "cosine":
        return 1 - (keys * q).sum(axis=1) / np.sqrt(squares * (q * q).sum())
    return np.maximum(squares, (q * q).sum()) - (keys * q).sum(axis=1)


def filled(metric: str, keys: np.ndarray) -> KeyMatrix:
    matrix = KeyMatrix(keys.shape[1], get_metric(metric), len(keys))
    for number, key in enumerate(keys):
        matrix.append(exact_bytes(key), checked(key, False).squared, number)
    return matrix


def ask(matrix: KeyMatrix, query: np.ndarray, tolerance: float) -> tuple[int | None, float]:
    return matrix.nearest(checked(query, False), tolerance)


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
@pytest.mark.parametrize("scale", [1e-14, 1e-6, 1.0, 1e6, 1e15])
@pytest.mark.parametrize("shape", ["random", "one direction", "leading zeros", "trailing zeros", "lengths"])
def test_a_bound_is_never_above_the_distance(metric: str, scale: float, shape: str) -> None:
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((KEYS, DIM))
    if shape == "one direction":
        keys = rng.standard_normal(DIM) + 1e-3 * keys
    if shape == "leading zeros":
        keys[:, : LEADING_COLUMNS + 5] = 0
    if shape == "trailing zeros":
        keys[:, LEADING_COLUMNS - 5 :] = 0
    if shape == "lengths":
        keys *= rng.uniform(0.01, 100, (KEYS, 1))
    keys = (keys * scale).astype(np.float32)
    leading = filled(metric, keys)._leading
    assert leading is not None
    largest = max(checked(key, False).squared for key in keys)
    for key in keys[:6]:
        query = (key + 0.05 * scale * rng.standard_normal(DIM)).astype(np.float32)
        gaps = exact(metric, query, keys)
        for tolerance in (float(gaps.min()), float(np.median(gaps)), float(gaps.max())):
            bounds = leading.bounds(query, KEYS)
            squared = checked(query, False).squared
            least = leading.least(max(0.0, tolerance), squared, leading.error(squared, largest))
            assert set(np.flatnonzero(gaps <= tolerance)) <= set(leading.remaining(bounds, least))


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_unrelated_keys_are_excluded(metric: str) -> None:
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((KEYS, DIM)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    leading = filled(metric, keys)._leading
    assert leading is not None
    query = (keys[3] + 0.001 * rng.standard_normal(DIM)).astype(np.float32)
    assert leading.remaining(
        leading.bounds(query, KEYS), leading.least(0.05, 1.0, leading.error(1.0, 1.0))
    ) == [3]


def test_narrow_and_small_keys_are_scanned_in_full() -> None:
    rng = np.random.default_rng(3)
    assert filled("l2", rng.standard_normal((200, 128)).astype(np.float32))._leading is None
    assert filled("l2", rng.standard_normal((20, DIM)).astype(np.float32))._leading is None


def test_columns_that_exclude_too_little_are_widened_and_then_left_alone() -> None:
    rng = np.random.default_rng(4)
    wordings = rng.standard_normal(DIM) + rng.standard_normal((KEYS + 100, DIM))  # cosines of 0.5
    keys, queries = np.split(wordings.astype(np.float32), [KEYS])
    matrix = filled("cosine", keys)
    widths, pauses = set(), 0
    for query in queries:
        expected = exact("cosine", query, keys)
        assert ask(matrix, query, 0.6) == (expected.argmin(), pytest.approx(float(expected.min()), abs=1e-9))
        assert matrix._leading is not None
        widths.add(matrix._leading.columns)
        pauses += matrix._leading._pause > 0
    assert widths == {94, 190, 382}
    assert pauses > 50
    assert matrix._leading is not None
    assert matrix._leading.pays(0.01)
    assert not matrix._leading.pays(0.6)


def test_a_near_key_excludes_the_others_of_its_topic() -> None:
    rng = np.random.default_rng(6)
    keys = (rng.standard_normal(DIM) + rng.standard_normal((KEYS, DIM))).astype(np.float32)
    matrix, queries = filled("cosine", keys), keys + np.float32(0.1)
    for number, query in enumerate(queries):
        assert ask(matrix, query, 0.6)[0] == number
    assert matrix._leading is not None
    assert (matrix._leading.columns, matrix._leading.pays(0.6)) == (LEADING_COLUMNS, True)


def test_a_pause_ends_and_grows() -> None:
    leading, tried = LeadingColumns(10, DIM, get_metric("l2")), []
    for number in range(2000):
        if leading.pays(1.0):
            tried.append(number)
            assert len(leading.remaining(np.zeros(10, np.float32), -1.0)) == 10
            if leading.exhausted:
                leading.pause(1.0)
    gaps = np.diff(tried[3:])
    assert tried[:4] == [0, 1, 2, 3]
    assert list(gaps[:4]) == [65, 129, 257, 513]


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
@pytest.mark.parametrize("tolerance", [0.05, 1.2])
def test_many_queries_are_answered_as_one_by_one(metric: str, tolerance: float) -> None:
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((KEYS, DIM)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    rows = np.concatenate([keys[:40] + np.float32(0.001), rng.standard_normal((9, DIM)) / 27])
    rows = rows.astype(np.float32)
    queries: list[Query] = [checked(row, True) for row in rows]
    together = list(filled(metric, keys).nearest_of_many(rows, queries, tolerance))
    assert together == [filled(metric, keys).nearest(query, tolerance) for query in queries]
    assert {slot for slot, _ in together[:40]} == set(range(40))


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
@pytest.mark.parametrize("tolerance", [1e4, 1e30, 1e300])
def test_a_boundless_tolerance_returns_the_nearest(metric: str, tolerance: float) -> None:
    rng = np.random.default_rng(6)
    keys = rng.standard_normal((KEYS, DIM)).astype(np.float32)
    matrix = filled(metric, keys)
    for query in rng.standard_normal((20, DIM)).astype(np.float32):
        expected = exact(metric, query, keys)
        assert ask(matrix, query, tolerance) == (expected.argmin(), pytest.approx(float(expected.min())))
