"""``python -m benchmarks budget``: whether calibrated budgets hold on other questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import budget as calibrate_check
from benchmarks.cli import app
from ragcachekit.commands.calibrate import run as calibrate


def test_bench_budget_measures_on_other_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    panel = calibrate_check.Panel

    def spied(model, tokenizer, questions, **options):
        seen.append([q.question + "".join(q.chunks) for q in questions])
        return panel(model, tokenizer, questions, **options)

    monkeypatch.setattr(calibrate_check, "Panel", spied)
    monkeypatch.setattr(calibrate, "Panel", spied)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(
        app,
        [
            *("budget", "--budgets", "0.3,0.9", "--encoders", "standalone", "--policies", "reuse"),
            *("--calibrate-on", "9", "--measure-on", "6", "--json", str(tmp_path / "b.json")),
        ],
    )
    assert result.exit_code == 0, result.output
    first, others = seen
    assert (len(first), len(others)) == (9, 6)
    assert not set(first) & set(others)
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    found = [row for row in rows if row["part"] == "budget"]
    assert [row["budget"] for row in found] == [0.3, 0.9]
    for row in found:
        assert row["loss"] == pytest.approx(row["f1_full"] - row["f1"])
        assert row["low"] <= row["loss"] <= row["high"]
        assert row["held"] == (row["loss"] <= row["budget"])
    assert {row["chosen"] for row in found} <= {"reuse", "full"}
    assert not (tmp_path / "home" / "ragcachekit" / "calibrations").exists()


def test_a_budget_that_is_none_is_refused_before_any_work() -> None:
    result = CliRunner().invoke(app, ["budget", "--budgets", "0.01,2"])
    assert result.exit_code == 2
    assert "loss of F1" in result.output
