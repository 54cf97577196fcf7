"""python -m benchmarks: a help text for every command, and the timing of lookups."""

import importlib.util
import itertools
import json

from benchmarks.__main__ import COMMANDS


def test_bench_query_cache_lookup(proofs, tmp_path):
    result = proofs(
        *("query-cache-lookup", "--capacities", "5,70", "--metrics", "l2,ip", "--dim", "32"),
        *("--lookups", "9"),
        *("--json", tmp_path / "q.json"),
    )
    assert result.exit_code == 0
    rows = json.loads((tmp_path / "q.json").read_text())["rows"]
    kinds = {(row["capacity"], row["metric"], row["kind"]) for row in rows}
    assert kinds == set(itertools.product((5, 70), ("l2", "ip"), ("far", "near", "equal")))
    assert len(rows) == len(kinds)
    assert all(0 < row["lookup_us_p10"] <= row["lookup_us"] <= row["lookup_us_p90"] for row in rows)
    result = proofs("query-cache-lookup", "--capacities", "many")
    assert result.exit_code == 2
    assert "--capacities takes numbers" in result.output


def test_every_command_has_a_help_text(proofs):
    for name in COMMANDS:
        result = proofs(name, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.stdout


def test_a_missing_matplotlib_is_said_before_the_run(proofs, monkeypatch, tmp_path):
    def find(name):
        return None if name == "matplotlib" else real(name)

    real = importlib.util.find_spec
    monkeypatch.setattr("benchmarks.output.importlib.util.find_spec", find)
    monkeypatch.setattr("ragcachekit.commands.ttft.run", None)
    result = proofs("ttft", "--plot", tmp_path / "plot.png")
    assert result.exit_code == 2
    assert "--plot needs matplotlib: pip install" in result.output
