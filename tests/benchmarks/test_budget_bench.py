"""``python -m benchmarks budget``: whether calibrated budgets hold on other questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.selection import budget as module
from ragcachekit.commands.calibrate import Loss


def test_bench_budget_measures_on_other_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of question ``i`` are known: calibrations never see those that check them."""
    table = [[Loss(x, x, 0.0, r) for x, r in ((i / 1000, 0.0), (0.0, 0.1))] for i in range(40)]
    monkeypatch.setattr(module, "_table", lambda *_: table)
    drawn: list[list[int]] = []

    def spied(ask, policies, order, budget):
        drawn.append(list(order))
        return module_race(ask, policies, order, budget)

    module_race = module.race
    monkeypatch.setattr(module, "race", spied)
    settings = module.CheckSettings(
        budgets=(0.03, 0.9), encoders=("standalone",), policies=("lego:4",), questions=40, repeats=5
    )
    report = module.run(settings)
    strict, loose = report.part("budget").rows
    assert [len(order) for order in drawn] == [30] * 10
    others = [sorted(set(range(40)) - set(order)) for order in drawn[:5]]
    truth = [sum(at / 1000 for at in rest) / len(rest) for rest in others]
    assert loose["held"] == 1.0
    assert loose["chosen"] == "reuse 5"
    assert strict["held"] == pytest.approx(sum(one <= 0.03 for one in truth) / 5)
    assert loose["loss"] == pytest.approx(sum(truth) / 5)


def test_bench_budget_runs(tmp_path: Path) -> None:
    given = ("--budgets", "0.3", "--encoders", "standalone", "--policies", "reuse", "--repeats", "3")
    counts = ("--questions", "12", "--calibrate-on", "8", "--json", str(tmp_path / "b.json"))
    result = CliRunner().invoke(app, ["budget", *given, *counts])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["part"], row.get("answers"), row.get("n")) for row in rows] == [
        ("budget", 8.0, None),
        ("losses", None, 12),
    ]
    assert rows[1]["ratio_spent"] == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [(("--budgets", "0.01,2"), "nats per answer token"), (("--calibrate-on", "150"), "fewer than are asked")],
)
def test_bad_settings_are_refused_before_any_work(given: tuple[str, str], message: str) -> None:
    result = CliRunner().invoke(app, ["budget", *given])
    assert result.exit_code == 2
    assert message in result.output
