"""The commands on a model whose chunks cannot be linked: each works, or says at once why not."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.families.families import all_families, tiny
from ragcachekit.commands.grades import why_prefix


@pytest.fixture
def files(corpus, tmp_path):
    return "--corpus", corpus, "--chunk-tokens", "34", "--cache", tmp_path / "cache"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (("calibrate",), "calibrate chooses which tokens of linked chunks to recompute"),
        (("bench", "fidelity"), "bench fidelity compares ways to link chunks"),
    ],
)
def test_what_chooses_among_policies_has_nothing_to_choose(command, files, name, why, hybrid):
    result = command(*name, "--model", hybrid, *files, "--probes", "8")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert f"{why}; this model's grade is prefix (Qwen3_5ForCausalLM does not run" in said
    assert "bench ttft and answer.report show what that saves" in said


def test_ttft_measures_full_and_prefix_whatever_is_named(command, hybrid, tmp_path):
    result = command(
        *("bench", "ttft", "--model", hybrid, "--prompt-tokens", "300", "--chunk-tokens", "80"),
        *("--question-tokens", "40", "--runs", "2", "--tiers", "host,disk", "--json", tmp_path / "t.json"),
    )
    assert result.exit_code == 0, result.output
    assert "policies full and prefix: this model's grade is prefix" in result.output
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [(row["policy"], row["tier"], row["encoder"]) for row in rows] == [
        *((name, "none", "none") for name in ("generate", "prefix-cache", "full", "cold")),
        *(("prefix", tier, "none") for tier in ("host", "disk")),
    ]


def test_ttft_of_a_model_that_reuses_nothing_is_one_line(command, hybrid, monkeypatch):
    monkeypatch.setattr("ragcachekit.engine.grade.check_snapshots", refuses)
    result = command("bench", "ttft", "--model", hybrid, "--prompt-tokens", "300")
    assert result.exit_code == 2
    assert "nothing is reused on this model" in result.output


def refuses(*_):
    raise RuntimeError("no snapshot")


def test_estimate_refuses_it_without_loading_the_model(command, files, hybrid, tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("Why?\n")
    result = command("estimate", "--log", log, "--model", hybrid, *files)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "estimate counts chunks that are linked; this model's grade is prefix (it has layers of" in said


def test_ask_reuses_the_beginning_of_an_equal_prompt(command, files, hybrid, one_minilm):
    question = "Where was he born?"
    result = command("ask", "--model", hybrid, *files, "--max-new-tokens", "4", question, question)
    assert result.exit_code == 0, result.output
    first, second = re.findall(r"(\d+) tokens: (\d+) reused", result.stdout)
    assert first[1] == "0"
    assert int(second[1]) > int(second[0]) * 0.9


def test_no_linked_family_is_taken_for_one_that_is_not(tmp_path):
    """And most that are not are known by their configuration alone."""
    found = {"linked": [], "prefix": []}
    rows = json.loads((Path(__file__).parents[2] / "benchmarks/results/families.json").read_text())["rows"]
    grades = {row["family"]: row["status"] for row in rows}
    for family in all_families():
        if (grade := grades[family.name]) in found:
            tiny(family.config, family.special).save_pretrained(tmp_path)
            found[grade].append(bool(why_prefix(str(tmp_path))))
    assert len(found["linked"]) == 100
    assert not any(found["linked"])
    assert sum(found["prefix"]) == 83
