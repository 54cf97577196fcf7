"""The near-miss bench: what its rules alter, and its figures on a few made-up questions."""

import json
import random

import numpy as np
import pytest

from benchmarks.near_misses import run as module
from benchmarks.near_misses.alterations import ALTERATIONS
from benchmarks.near_misses.pairs import DEVELOP, REPORT

NAMES = ["Oslo", "New York", "Rome"]


@pytest.mark.parametrize(
    ("kind", "question", "altered"),
    [
        ("negation", "Who did it?", ["Who did not it?"]),
        ("negation", "Who did not see it?", ["Who did see it?"]),
        ("opposite", "What is the highest hill?", ["What is the lowest hill?"]),
        ("swapped roles", "Did old Rome beat Oslo?", ["Did old Oslo beat Rome?"]),
        ("swapped roles", "Did old Rome and Oslo fall?", []),
        ("question word", "Which hill is it?", []),
    ],
)
def test_a_rule_alters_one_thing(kind, question, altered):
    assert list(ALTERATIONS[kind](question, NAMES, random.Random(0))) == altered


def test_names_and_numbers_are_replaced_by_others():
    rng = random.Random(0)
    others = set(ALTERATIONS["name"]("Is it in New York?", NAMES, rng))
    assert others == {"Is it in Oslo?", "Is it in Rome?"}
    for question in ("What was in 1914?", "Name the two hills?", "Is it 5 miles?"):
        altered = list(ALTERATIONS["number"](question, NAMES, rng))
        assert altered
        assert question not in altered


class Embedder:
    """Every text at the same place: each pair is within every tolerance."""

    def embed(self, texts, *, progress=False):
        return np.ones((len(texts), 2), np.float32) / np.sqrt(2)


def article(title, questions):
    qas = [
        {"question": f"Who led the {i + 2} towns of {title} near Oslo?", "is_impossible": False}
        for i in range(questions)
    ]
    qas.append({"question": f"Who left the towns of {title} near Oslo?", "is_impossible": True})
    return {
        "title": title,
        "paragraphs": [{"context": "It is said that Rome fell. So did Oslo.", "qas": qas}],
    }


def test_the_figures_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MiniLM", Embedder)
    file = tmp_path / "squad.json"
    file.write_text(json.dumps({"data": [article("wool", 3), article("iron", 2)]}))
    for half, questions in ((DEVELOP, 3), (REPORT, 2)):
        report = module.run(file, half)
        rows = {row["kind"]: row for row in report.part(module.NEAR).rows if row["tolerance"] == 0.1}
        assert rows["number"]["pairs"] == questions
        assert rows["by crowd workers"]["pairs"] == 1
        assert rows["all"]["pairs"] == rows["all by rules"]["pairs"] + 1
        assert all(row["wrong_hits_without"] == row["pairs"] >= row["wrong_hits"] for row in rows.values())
        kept = {row["kind"]: row for row in report.part(module.SAME).rows}
        assert {"by hand", "demo", "prefix"} <= kept.keys()
        assert all(row["hits"] <= row["hits_without"] == row["pairs"] for row in kept.values())
        assert report.part(module.TIME).rows[0]["us_p50"] > 0


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"data": [{"title": "one"}]}'])
def test_another_format_is_refused(tmp_path, text):
    file = tmp_path / "squad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="SQuAD"):
        module.run(file, REPORT)
