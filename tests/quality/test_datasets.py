"""Datasets of the fidelity bench: published formats, and the prompts that are drawn from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragcachekit.commands.questions import Passages, Sampling, draw_questions, half_of, load_dataset

PARAGRAPHS = [f"Paragraph {n} tells that item {n} is number {n}." for n in range(6)]


def written(path: Path, value: Any, lines: bool = False) -> Path:
    path.write_text("\n".join(map(json.dumps, value)) if lines else json.dumps(value), encoding="utf-8")
    return path


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    def asked(n: int, **more: Any) -> dict[str, Any]:
        answers = [{"text": str(n)}, {"text": f"number {n}"}, {"text": str(n)}]
        return {"question": f" What is item {n}? ", "answers": answers, **more}

    paragraphs = [{"context": f" {text}\n", "qas": [asked(n)]} for n, text in enumerate(PARAGRAPHS)]
    paragraphs[0]["qas"].append(asked(9, is_impossible=True))
    paragraphs[1]["qas"].append({"question": "Nothing?", "answers": [], "is_impossible": True})
    return written(tmp_path / "squad.json", {"data": [{"title": "Items", "paragraphs": paragraphs}]})


def test_squad_has_the_paragraph_and_its_article(squad: Path) -> None:
    found = load_dataset(f"squad:{squad}")
    assert len(found) == 6
    assert found[3] == Passages(
        "What is item 3?", ("3", "number 3"), (PARAGRAPHS[3],), tuple(PARAGRAPHS), tuple(PARAGRAPHS)
    )


def test_a_prompt_holds_the_relevant_passage_and_distractors_of_its_document(squad: Path) -> None:
    (drawn,) = draw_questions(f"squad:{squad}", Sampling(count=1, distractors=2, seed=4))
    number = int(drawn.answers[0])
    assert len(drawn.chunks) == len(set(drawn.chunks)) == 3
    assert PARAGRAPHS[number] in drawn.chunks
    assert set(drawn.chunks) <= set(PARAGRAPHS)
    assert drawn.answers == (str(number), f"number {number}")
    assert drawn.document == tuple(PARAGRAPHS)
    assert draw_questions(f"squad:{squad}", Sampling(count=1, distractors=2, seed=4)) == (drawn,)
    draws = [Sampling(count=6, distractors=5, seed=seed) for seed in range(5)]
    assert len({draw_questions(f"squad:{squad}", draw)[0].chunks for draw in draws}) > 1


def test_halves_are_disjoint_whatever_the_seed(squad: Path) -> None:
    def drawn(half: str, seed: int) -> set[str]:
        found = draw_questions(f"squad:{squad}", Sampling(count=99, half=half, seed=seed))
        return {question.question for question in found}

    assert drawn("develop", 0) == drawn("develop", 1)
    assert drawn("develop", 0) | drawn("report", 0) == drawn("all", 0)
    assert not drawn("develop", 0) & drawn("report", 5)
    assert sum(half_of(f"question {n}") == "report" for n in range(1000)) in range(400, 600)


def test_musique_as_published_and_as_cacheblend_has_it(tmp_path: Path) -> None:
    parts = [
        {"title": f"T{n}", "paragraph_text": text, "is_supporting": n in (1, 4)}
        for n, text in enumerate(PARAGRAPHS)
    ]
    line = {"question": "Which?", "answer": "1", "answer_aliases": ["one"], "paragraphs": parts}
    unanswerable = {**line, "answerable": False}
    (found,) = load_dataset(f"musique:{written(tmp_path / 'a.jsonl', [line, unanswerable], lines=True)}")
    assert found.relevant == (f"T1\n{PARAGRAPHS[1]}", f"T4\n{PARAGRAPHS[4]}")
    assert found.answers == ("1", "one")
    assert len(found.others) == 4
    contexts = [{"title": "", "text": text} for text in PARAGRAPHS]
    blend = {"question": "Which?", "answers": ["ITEM 2"], "ctxs": contexts}
    (found,) = load_dataset(f"musique:{written(tmp_path / 'b.json', [blend])}")
    assert found.relevant == (PARAGRAPHS[2],)
    assert found.document == ()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("squad", "squad:FILE"),
        ("trivia:x.json", "unknown dataset"),
        ("squad:{own}", "not in the format of squad"),
        ("musique:{squad}", "not in the format of musique"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, squad: Path, spec: str, message: str) -> None:
    own = written(tmp_path / "own.jsonl", [{"question": "Q?", "chunks": ["a"], "answer": "b"}], lines=True)
    with pytest.raises(ValueError, match=message):
        load_dataset(spec.format(squad=squad, own=own))
    with pytest.raises(OSError, match="nowhere"):
        load_dataset("squad:/nowhere.json")
