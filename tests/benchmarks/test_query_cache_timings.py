"""Lookup timings of the query-cache bench come with their spread, and notice a wrong cache."""

from __future__ import annotations

import pytest

from benchmarks.query_cache.lookups import LookupSettings, lookup_rows, run
from ragcachekit.retrieval.proximity import Hit, ProximityCache


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_timings_come_with_their_spread(metric: str) -> None:
    rows = lookup_rows(5, 8, metric, lookups=20, seed=0)
    assert [row["kind"] for row in rows] == ["far", "near", "equal"]
    for row in rows:
        assert 0 < row["lookup_us_p10"] <= row["lookup_us"] <= row["lookup_us_p90"]


@pytest.mark.parametrize("wrong", [None, Hit((1,), 0.0)])
def test_a_wrong_cache_reports_no_timings(wrong: Hit | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProximityCache, "lookup", lambda self, embedding, *, partition: wrong)
    with pytest.raises(RuntimeError, match="the nearest key lies at"):
        lookup_rows(8, 16, "cosine", lookups=20, seed=0)


def test_a_report_has_a_row_for_every_capacity_metric_and_kind() -> None:
    report = run(LookupSettings(capacities=(70, 300), metrics=("cosine", "l2"), dim=256, lookups=30))
    assert len(report.rows) == 2 * 2 * 3
    for row in report.rows:
        assert row["hit_rate"] == (0.0 if row["kind"] == "far" else 1.0)
