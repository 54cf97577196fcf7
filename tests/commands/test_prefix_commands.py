"""The commands on a model whose chunks cannot be linked: each works, or says at once why not."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.families.families import all_families, tiny
from ragcachekit.commands.grades import why_prefix
from ragcachekit.commands.questions import SEPARATOR, PromptMaker, bare_ids
from ragcachekit.commands.workspace import load_tokenizer


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
    assert "bench ttft and estimate show what it saves" in said


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


def test_estimate_counts_exact_beginnings(command, files, hybrid, tmp_path):
    texts = [f"{what} " * 60 for what in ("soap", "wood", "iron")]
    orders = [texts, texts, texts[:2], texts[::-1]]  # the last one has only the system text in common
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"question": "Why?", "chunks": one}) + "\n" for one in orders))
    out = tmp_path / "out.json"
    result = command("estimate", "--log", log, "--model", hybrid, *files, "--json", out)
    assert result.exit_code == 0, result.output
    assert "as exact beginnings; answers stay the same" in result.stdout
    summary, *sizes = json.loads(out.read_text())["rows"]
    tokenizer = load_tokenizer(str(hybrid))
    maker = PromptMaker(tokenizer)
    one, two, three = (len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
    system = len(tokenizer(maker.before, add_special_tokens=False).input_ids)
    total = sum(len(bare_ids(tokenizer, maker.filled(SEPARATOR.join(o), "Why?"))) for o in orders)
    found = 3 * system + 2 * (one + two) + three
    assert sizes[-1]["tokens_found"] == pytest.approx(found / total)
    nodes = 7  # the system text, three beginnings, three more of the other order
    assert summary["kv_bytes_used"] == (system + 2 * (one + two + three)) * 256 + nodes * 12_288


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
