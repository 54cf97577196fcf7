"""Lookup timings of the query-cache bench come with their spread, and notice a wrong cache."""

from __future__ import annotations

import pytest

from benchmarks.world.query_cache import lookup_rows, wrapper_row
from ragcachekit.query.base import Hit
from ragcachekit.query.proximity import ProximityCache


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_timings_come_with_their_spread(metric: str) -> None:
    rows = lookup_rows(5, 8, metric, lookups=20, seed=0)
    assert [row["kind"] for row in rows] == ["miss", "near", "repeat"]
    for row in rows:
        assert 0 < row["lookup_us_min"] <= row["lookup_us"] <= row["lookup_us_max"]
    overhead = wrapper_row(5, 64, calls=20, seed=0)
    assert 0 < overhead["overhead_us_min"] <= overhead["overhead_us"]


@pytest.mark.parametrize("wrong", [None, Hit((1,), 0.0)])
def test_a_wrong_cache_reports_no_timings(wrong: Hit | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProximityCache, "lookup", lambda self, embedding, *, partition: wrong)
    with pytest.raises(RuntimeError, match="the nearest key lies at"):
        lookup_rows(8, 16, "cosine", lookups=20, seed=0)
