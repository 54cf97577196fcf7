"""python -m benchmarks: demo and a help text for every command."""

import json
from dataclasses import replace

import pytest

from benchmarks.__main__ import COMMANDS
from benchmarks.demo.corpus import QUICK, Settings


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


@pytest.mark.parametrize(
    ("arguments", "given"),
    [((), Settings()), (("--quick",), QUICK), (("--full",), replace(Settings(), chunks=None))],
)
def test_demo_hands_its_options_on(proofs, monkeypatch, tmp_path, arguments, given):
    heard = []
    monkeypatch.setattr("benchmarks.demo.run.run", lambda *options: heard.append(options))
    assert proofs("demo", "--out", tmp_path, *arguments).exit_code == 0
    assert heard == [(given, tmp_path)]


def test_every_command_has_a_help_text(proofs):
    for name in COMMANDS:
        result = proofs(name, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.stdout
