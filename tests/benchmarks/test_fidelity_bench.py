"""``python -m benchmarks fidelity`` over the sample world and a dataset, and where it was interrupted."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import fidelity
from benchmarks.__main__ import app
from benchmarks.datasets import Passages, Sampling, draw_questions, half_of, load_dataset
from benchmarks.fidelity import ALONE
from ragcachekit.commands.engines import Engines

pytestmark = pytest.mark.soak

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


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The user's cache folder: the reader is admitted once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def command(*arguments):
    return CliRunner().invoke(app, ["fidelity", *map(str, arguments)])


def test_the_reader_is_asked_about_every_kind(home, tmp_path):
    options = ("--policies", "reuse", "--encoders", "similar:1", "--neighbours", "document")
    result = command(*options, "--questions-per-type", 1, "--json", tmp_path / "f.json")
    assert result.exit_code == 0, result.output
    frame = json.loads((tmp_path / "f.json").read_text())
    assert (frame["bench"], frame["model"]) == ("fidelity", "the trained reader of the repository")
    quality = [r for r in frame["rows"] if r["part"] == "quality"]
    assert {r["question_type"] for r in quality} == {"all", "a", "b", "c"}
    assert ("reuse", "similar:1") in {(r["policy"], r["encoder"]) for r in quality}


def test_a_dataset_is_asked_with_what_is_recovered_and_a_picture(home, squad, tmp_path):
    options = ("--policies", "lego:2", "--dataset", f"squad:{squad}", "--count", 2, "--prompt", "few-shot")
    result = command(*options, "--json", tmp_path / "f.json", "--plot", tmp_path / "f.png")
    assert result.exit_code == 0, result.output
    rows = [r for r in json.loads((tmp_path / "f.json").read_text())["rows"] if r["part"] == "quality"]
    assert [r["answer_kl_recovery"] for r in rows if (r["policy"], r["encoder"]) == ALONE] == [0.0]
    assert all(r["n"] == 2 and "answer_kl_recovery_low" in r for r in rows)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_goes_on(home, tmp_path, monkeypatch):
    options = ("--policies", "lego:4,lego0", "--questions-per-type", 1, "--json", tmp_path / "f.json")
    work = tmp_path / "f.json.work"
    assert command(*options, "--resume", tmp_path / "whole.work").exit_code == 0
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    whole = (tmp_path / "whole.work").read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 1 + 4 * 3
    work.write_bytes(b"".join(lines[:6]) + lines[6][:40])  # cut off within a line

    def stop(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engines, "compare", stop)
        result = command(*options)
    assert result.exit_code == 130
    assert "the same command goes on" in result.output
    assert work.read_bytes() == b"".join(lines[:6])
    other = command(*options, "--seed", 3)
    assert other.exit_code == 2
    assert "is of another run" in other.output
    assert command(*options).exit_code == 0
    assert json.loads((tmp_path / "f.json").read_text())["rows"] == rows
    assert not work.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "lego:4,fastest"), "unknown policy 'fastest'"),
        (("--neighbours", "random"), "embedding or document"),
        (("--encoders", ","), "at least one encoder"),
        (("--seed", "-1"), "the seed must be from 0"),
        (("--questions-per-type", "100000"), "cannot take 100000 questions"),
    ],
)
def test_bad_arguments_are_refused_before_the_reader_is_loaded(monkeypatch, arguments, message):
    monkeypatch.setattr(fidelity, "load_checked", None)
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.output


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
