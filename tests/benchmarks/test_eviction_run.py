"""The bench as a whole, on tiny traces: its rows, its ratios, its tables and its picture."""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.eviction.profiles import MACHINES, open_costs
from benchmarks.eviction.replay import Prompt, plan, replay
from benchmarks.eviction.report import plot, ratio_rows, safety_rows, tables, tier_rows, verdict
from benchmarks.eviction.run import ONE_TIER, PRODUCT, TWO_TIERS, EvictionSettings, run, steps
from benchmarks.eviction.traces import TraceShape, open_trace
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.store.eviction import open_eviction

SHAPE = TraceShape(documents=80, requests=200, mean_tokens=300)
SETTINGS = EvictionSettings(
    traces=("zipf", "zipf-equal"), policies=("lru", "pgdsf"), shares=(0.02, 0.1), seeds=3, shape=SHAPE
)


@pytest.fixture(scope="module")
def report():
    return run(SETTINGS)


def test_one_row_per_cell_and_policy_with_the_agreed_columns(report):
    rows = [row for row in report.rows if row["part"] == ONE_TIER]
    assert len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        assert {"trace", "policy", "capacity", "hit_rate", "belady_hit_rate"} <= set(row)
        assert 0 <= row["hit_rate_min"] <= row["hit_rate"] <= row["hit_rate_max"] <= row["belady_hit_rate"]
        assert row["time_saved_min"] <= row["time_saved"] <= row["time_saved_max"]
        assert row["token_hit_rate"] <= row["belady_token_hit_rate"]
        assert row["bound"] == ("MIN" if row["trace"] == "zipf-equal" else "PFOO-L")
        assert row["seeds"] == 3
    assert len([row for row in report.rows if row["part"] == TWO_TIERS]) == 2 * 2 * 3


def test_figures_are_medians_over_the_seeds_and_ratios_are_paired(report):
    costs, prompt = open_costs("llama-3.1-8b"), Prompt()
    found = {"lru": [], "pgdsf": []}
    for seed in range(3):
        trace = open_trace("zipf", SHAPE, seed)
        made = plan(trace, "chunks", costs.profile, prompt)
        for policy, outcomes in found.items():
            size = int(0.1 * trace.corpus_tokens)
            outcomes.append(replay(made, open_eviction(policy), size, costs.profile, prompt))
    (row,) = [
        row
        for row in report.rows
        if (row["part"], row["trace"], row["structure"], row["capacity_share"], row["policy"])
        == (ONE_TIER, "zipf", "chunks", 0.1, "lru")
    ]
    rates = [outcome.hit_rate for outcome in found["lru"]]
    assert row["hit_rate"] == statistics.median(rates)
    assert (row["hit_rate_min"], row["hit_rate_max"]) == (min(rates), max(rates))
    ratios = [a.time_saved / b.time_saved for a, b in zip(found["pgdsf"], found["lru"], strict=True)]
    assert row["pgdsf_time_ratio"] == statistics.median(ratios)
    assert (row["pgdsf_time_ratio_min"], row["pgdsf_time_ratio_max"]) == (min(ratios), max(ratios))


def test_pgdsf_finds_more_than_lru_and_gdsf_where_popularity_is_skewed():
    shape = TraceShape(documents=400, requests=1500)
    report = run(EvictionSettings(traces=("zipf-equal",), shares=(0.02, 0.08), tiers=False, shape=shape))
    ratios = {(r["structure"], r["capacity_share"], r["policy"]): r["pgdsf_hit_ratio"] for r in report.rows}
    assert all(ratio > 1.03 for (_, _, policy), ratio in ratios.items() if policy == "lru")
    assert all(ratio > 1 for (_, _, policy), ratio in ratios.items() if policy == "gdsf")
    assert all(ratio == 1 for (_, _, policy), ratio in ratios.items() if policy == "pgdsf")


def test_the_progress_adds_up_to_the_steps():
    done = []
    run(
        EvictionSettings(traces=("scan",), policies=("lru",), seeds=1, shape=SHAPE, shares=(0.1,)),
        done.append,
    )
    settings = EvictionSettings(traces=("scan",), seeds=1, shares=(0.1,))
    assert sum(done) == steps(settings) == 3


def test_tiers_that_hold_everything_are_left_out():
    report = run(
        EvictionSettings(traces=("zipf",), policies=("lru",), seeds=1, shape=SHAPE, shares=(0.05, 0.2))
    )
    assert {row["capacity_share"] for row in report.rows if row["part"] == TWO_TIERS} == {0.05}


def test_without_pgdsf_there_are_no_ratios():
    report = run(
        EvictionSettings(traces=("zipf",), policies=("lru", "f_r"), seeds=1, tiers=False, shape=SHAPE)
    )
    assert all(row["pgdsf_hit_ratio"] is None for row in report.rows)
    assert ratio_rows(report) == []
    assert verdict(report) is None
    assert len(tables(report)) == 5


def test_tables_and_picture(report, tmp_path):
    console = Console(width=200, record=True, file=io.StringIO())
    for shown in tables(report):
        console.print(shown)
    text = console.export_text()
    for words in ("Documents found", "Tokens found", "Requests of which", "Prefill time saved", "1.06-1.62"):
        assert words in text
    plot(report, tmp_path / "eviction.png")
    assert (tmp_path / "eviction.png").stat().st_size > 10_000


def test_summaries_say_what_the_rows_say(report):
    rows = [row for row in report.rows if row["part"] == ONE_TIER]
    (ratio,) = [r for r in ratio_rows(report) if (r["trace"], r["structure"]) == ("zipf", "tree")]
    cells = [r for r in rows if (r["trace"], r["structure"], r["policy"]) == ("zipf", "tree", "lru")]
    low, high = sorted(row["pgdsf_hit_ratio"] for row in cells)
    assert ratio["hit_ratio"] == f"{low:.2f} to {high:.2f}"
    assert ratio["hit_cells_lost"] == f"{(low < 1) + (high < 1)} of 2"
    safety = {(r["structure"], r["policy"]): r["worst_share"] for r in safety_rows(report)}
    worst = 1.0
    for row in rows:
        rivals = [
            r["hit_rate"]
            for r in rows
            if all(r[name] == row[name] for name in ("trace", "structure", "capacity_share"))
        ]
        if (row["structure"], row["policy"]) == ("tree", "lru"):
            worst = min(worst, row["hit_rate"] / max(rivals))
    assert safety["tree", "lru"] == pytest.approx(worst)
    assert [r["gain_in_points"] for r in tier_rows(report) if r["gpu_cost"] == "prefill"] == ["-", "-"]
    assert "of 8 cells" in verdict(report)


def test_a_measured_profile_is_used_and_says_nothing_of_loading(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(vars(PrefillProfile(1.0, 0.005))))
    costs = open_costs(str(path))
    assert costs.profile.seconds(0, 100) == 1.5
    report = run(
        EvictionSettings(traces=("zipf",), policies=("lru",), seeds=1, shape=SHAPE, profile=str(path))
    )
    assert {row["part"] for row in report.rows} == {ONE_TIER}
    assert "profile.json" in report.model


@pytest.mark.parametrize("name", MACHINES)
def test_loading_is_much_cheaper_than_computing(name):
    costs = open_costs(name)
    assert 0 < costs.load_seconds < costs.profile.seconds(0, 1000) / 5000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seeds": 0}, "seeds must be"),
        ({"shares": (0.1, 1.5)}, "above 0 up to 1"),
        ({"shares": ()}, "above 0 up to 1"),
        ({"structures": ("list",)}, "known: tree, chunks"),
        ({"policies": ("mru",)}, "known: lru, lfu"),
    ],
)
def test_bad_settings_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        EvictionSettings(**change)


def test_unknown_names_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="unknown trace"):
        run(EvictionSettings(traces=("uniform",)))
    with pytest.raises(ValueError, match="or a profile's JSON file"):
        run(EvictionSettings(profile="gpt-5"))


def test_the_product_finds_what_the_replay_finds():
    """LRU has no costs and no clock: store and tree must come to the very figures of the replay."""
    settings = replace(SETTINGS, policies=("lru", "pgdsf"), shares=(0.1,), seeds=1, tiers=False, product=True)
    done = []
    rows = run(settings, done.append).rows
    assert sum(done) == steps(settings)
    by = {(r["part"], r["trace"], r["structure"], r["policy"]): r for r in rows}
    for trace in settings.traces:
        chunks = [by[part, trace, "chunks", "lru"]["time_saved"] for part in (PRODUCT, ONE_TIER)]
        assert chunks[0] == pytest.approx(chunks[1], abs=0.02)
        assert by[PRODUCT, trace, "tree", "pgdsf"]["hit_rate"] > 0
    assert by[PRODUCT, "zipf", "tree", "lru"]["pgdsf_time_ratio"] > 0
