"""Differences per question between policies at equal cost, from a work file."""

from __future__ import annotations

import json

import pytest

from benchmarks.selection.paired import read, rows


def work_file(path, ways):
    """``ways``: (policy, encoder, ratio, KL by question)."""
    lines = [{"fidelity": 4, "seed": 0}]
    for policy, encoder, ratio, values in ways:
        for question, value in enumerate(values):
            result = {"ratio_spent": ratio, "answer_kl": value}
            lines.append({"question": question, "policy": policy, "encoder": encoder, "result": result})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def work(tmp_path):
    hard = [float(i) for i in range(40)]  # questions differ far more than policies do
    return work_file(
        tmp_path / "work",
        [
            ("full", "none", 1.0, [0.0] * 40),
            ("impact:0.05", "a", 0.05, [v + 0.3 for v in hard]),
            ("impact:0.1", "a", 0.1, [v + 0.1 for v in hard]),
            ("impact:0.3", "a", 0.3, hard),
            ("reuse", "a", 0.0, [v + 1 for v in hard]),
            ("query:0.1", "a", 0.096, [v + 0.2 for v in hard]),
            ("lego:4", "a", 0.02, hard),
            ("lego:16", "a", 0.2, hard[:30]),
            ("query:0.1", "b", 0.1, hard),
        ],
    )


def test_each_way_meets_the_policy_at_the_most_it_may_spend(work):
    found = {row["other"]: row for row in rows(read(work), "impact", "answer_kl")}
    assert {other: row["policy"] for other, row in found.items()} == {
        "query:0.1": "impact:0.1",  # 0.4 % more of the rows
        "lego:16": "impact:0.1",
    }
    assert found["query:0.1"]["encoder"] == "a"


def test_intervals_are_of_the_differences(work):
    found = {row["other"]: row for row in rows(read(work), "impact", "answer_kl")}
    row = found["query:0.1"]
    assert row["less"] == pytest.approx(0.1)
    assert row["low"] == pytest.approx(0.1)
    assert row["high"] == pytest.approx(0.1)
    assert found["lego:16"]["less"] == pytest.approx(-0.1)
    assert (found["lego:16"]["n"], row["n"]) == (30, 40)


def test_the_command(proofs, work, tmp_path):
    assert "query:0.1" in proofs("paired", work, "--json", tmp_path / "out.json").output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["bench"] == "paired"
    assert len(report["rows"]) == 2


def test_another_file(tmp_path):
    path = tmp_path / "work"
    path.write_text('{"bench": "ttft"}\n')
    with pytest.raises(ValueError, match="no work file"):
        read(path)
