"""``ragcachekit bench fidelity`` on a user's model, questions and corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.world.questions import held_out_world, world_questions
from benchmarks.world.reader_folder import READER
from ragcachekit.commands.app import app
from ragcachekit.commands.bench.fidelity import run as fidelity


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache folder: the model is admitted once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    lines = [{"question": q.question, "chunks": q.chunks, "answer": q.answer} for q in world_questions(0, 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Articles as files of two paragraphs."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, article in enumerate(held_out_world(3).articles[:4]):
        (folder / f"{number}.txt").write_text("\n\n".join(article.chunks))
    return folder


def command(*arguments: object) -> Result:
    given = ["bench", "fidelity", "--model", READER, *map(str, arguments)]
    return CliRunner().invoke(app, given)


def test_the_command_writes_json(home: Path, questions: Path, tmp_path: Path) -> None:
    result = command(
        *("--questions", questions, "--policies", "lego:4", "--encoders", "standalone,sinks:2"),
        *("--json", tmp_path / "f.json", "--max-new-tokens", 16),
    )
    assert result.exit_code == 0, result.output
    frame = json.loads((tmp_path / "f.json").read_text())
    assert (frame["bench"], frame["seed"], frame["model"]) == ("fidelity", 0, READER)
    quality = [r for r in frame["rows"] if r["part"] == "quality"]
    assert {(r["policy"], r["encoder"]) for r in quality} >= {("lego:4", "standalone"), ("lego:4", "sinks:2")}
    assert {r["question_type"] for r in quality} == {"all"}
    assert not (tmp_path / "f.json.work").exists()


def test_probes_are_made_of_a_corpus(home: Path, corpus: Path, tmp_path: Path) -> None:
    result = command(
        *("--corpus", corpus, "--probes", 2, "--chunk-tokens", 60, "--policies", "reuse"),
        *("--encoders", "similar:1", "--neighbours", "document", "--max-new-tokens", 8),
        *("--json", tmp_path / "f.json"),
    )
    assert result.exit_code == 0, result.output
    quality = [r for r in json.loads((tmp_path / "f.json").read_text())["rows"] if r["part"] == "quality"]
    assert {r["question_type"] for r in quality} == {"all", "cloze", "continuation"}
    assert ("reuse", "similar:1") in {(r["policy"], r["encoder"]) for r in quality}


def test_an_interrupted_command_says_how_to_go_on(
    home: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fidelity, "measure", stop)
    options = ("--policies", "reuse", "--questions", questions, "--json", tmp_path / "f.json")
    result = command(*options)
    assert result.exit_code == 130
    assert "the same command goes on" in result.output
    assert (tmp_path / "f.json.work").exists()
    monkeypatch.undo()
    assert command(*options, "--resume", tmp_path / "f.json.work").exit_code == 0
    assert (tmp_path / "f.json.work").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "lego:4,fastest"), "unknown policy 'fastest'"),
        (("--policies", "lego:x"), "lego:x"),
        (("--dtype", "int3"), "unknown dtype"),
        (("--neighbours", "random"), "unknown neighbours"),
        (("--neighbours", "document"), "give --questions"),
        (("--questions", "/nowhere.jsonl"), "there is no file /nowhere.jsonl; give --questions"),
        (("--corpus", "/nowhere"), "does not exist"),
        ((), "give --questions (JSONL), or --corpus"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(fidelity, "load_checked", None)
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_model_is_needed() -> None:
    result = CliRunner().invoke(app, ["bench", "fidelity"])
    assert result.exit_code == 2
    assert "which model" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--encoders", "standalone,backwards"), "unknown encoder 'backwards'"),
        (("--encoders", ","), "at least one encoder"),
        (("--model", "/nowhere"), "cannot load the model"),
    ],
)
def test_bad_encoders_are_refused_before_any_work(
    home: Path, questions: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(fidelity, "Work", None)
    result = command("--questions", questions, *arguments)
    assert result.exit_code == 2
    assert message in result.output
