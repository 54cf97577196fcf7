"""Rows that a policy spares and recomputes where an entry is used."""

from __future__ import annotations

import pytest

from ragcachekit.plan.load_planner import RowCost, row_cost_of
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.policies.registry import open_policy

OPEN, EXACT = PlacedChunk("open", 7, 40, False), PlacedChunk("exact", 0, 40, True)


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
def test_rows_spared_and_recomputed(policy, recomputed):
    policy = open_policy(policy)
    assert row_cost_of(policy, OPEN, 4) == RowCost(40 - recomputed, recomputed)
    assert row_cost_of(policy, EXACT, 4) == RowCost(40)
