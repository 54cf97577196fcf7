"""python -m benchmarks: demo, query-cache and a help text for every command."""

import json
from dataclasses import replace

import pytest

from benchmarks.cli import app
from benchmarks.demo.corpus import QUICK, Settings
from benchmarks.world.world import make_world


@pytest.fixture
def small_world(monkeypatch):
    monkeypatch.setattr(
        "benchmarks.world.query_cache.make_world",
        lambda seed: make_world(seed, people=4, companies=2, towns=2),
    )


def test_bench_query_cache_has_three_parts(proofs, one_minilm, small_world, tmp_path):
    result = proofs(
        *("query-cache", "--lookups", "20", "--questions", "10"),
        *("--json", tmp_path / "q.json", "--plot", tmp_path / "q.svg"),
    )
    assert result.exit_code == 0
    rows = json.loads((tmp_path / "q.json").read_text())["rows"]
    lookups = [row for row in rows if row["part"] == "lookup"]
    assert {(row["capacity"], row["dim"]) for row in lookups} == {(300, 768), (1000, 768)}
    (wrapper,) = [row for row in rows if row["part"] == "wrapper"]
    assert wrapper["overhead_us"] > 0
    sweep = [row for row in rows if row["part"] == "sweep"]
    assert {row["capacity"] for row in sweep} == {1, 5, 10}
    exact = [row for row in sweep if row["tolerance"] == 0]
    assert all((row["hit_rate"], row["result_recall"]) == (0, 1) for row in exact)
    widest = max(sweep, key=lambda row: (row["capacity"], row["tolerance"]))
    assert widest["hit_rate"] > 0
    assert (tmp_path / "q.svg").read_text().startswith("<?xml")


def test_bench_query_cache_without_a_sweep(proofs, tmp_path):
    result = proofs("query-cache", "--lookups", "5", "--questions", "0")
    assert result.exit_code == 0
    assert "Hit rate" not in result.stdout
    result = proofs("query-cache", "--lookups", "5", "--questions", "0", "--plot", tmp_path / "q.png")
    assert result.exit_code == 2
    assert "no sweep to draw" in result.output


def test_bench_query_cache_lookup(proofs, tmp_path):
    result = proofs(
        *("query-cache-lookup", "--capacities", "5,70", "--metrics", "l2", "--dim", "32", "--lookups", "9"),
        *("--json", tmp_path / "q.json"),
    )
    assert result.exit_code == 0
    rows = json.loads((tmp_path / "q.json").read_text())["rows"]
    assert [(row["capacity"], row["kind"]) for row in rows] == [
        (capacity, kind) for capacity in (5, 70) for kind in ("far", "near", "equal")
    ]
    result = proofs("query-cache-lookup", "--capacities", "many")
    assert result.exit_code == 2
    assert "--capacities takes numbers" in result.output


def test_too_many_questions_are_refused(proofs, one_minilm, small_world):
    result = proofs("query-cache", "--lookups", "5", "--questions", "5000")
    assert result.exit_code == 2
    assert "questions must be between" in result.output


@pytest.mark.parametrize(
    ("arguments", "given"),
    [((), Settings()), (("--quick",), QUICK), (("--full",), replace(Settings(), chunks=None))],
)
def test_demo_hands_its_options_on(proofs, monkeypatch, tmp_path, arguments, given):
    heard = []
    monkeypatch.setattr("benchmarks.demo.run.run", lambda *options: heard.append(options))
    assert proofs("demo", "--out", tmp_path, *arguments).exit_code == 0
    assert heard == [(given, tmp_path)]


def test_demo_is_quick_or_full(proofs):
    result = proofs("demo", "--quick", "--full")
    assert result.exit_code == 2
    assert "not both" in result.output


def test_every_command_has_a_help_text(proofs):
    commands = [info.callback.__name__.replace("_", "-") for info in app.registered_commands]
    assert {"demo", "fidelity", "query-cache", "budget", "eviction"} < set(commands)
    for name in commands:
        result = proofs(name, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.stdout
