"""``ragcachekit bench fidelity``: what it writes, how it is interrupted, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ragcachekit.bench import fidelity
from ragcachekit.bench.fidelity_questions import world_questions
from ragcachekit.cli import app


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache folder: the reader is admitted once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "fidelity", *map(str, arguments)])


def test_the_command_writes_json_and_plot(home: Path, tmp_path: Path) -> None:
    world = world_questions(0, 1)
    questions = tmp_path / "q.jsonl"
    lines = [{"question": q.question, "chunks": q.chunks, "answer": q.answer} for q in world]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = command(
        *("--questions", questions, "--policies", "lego:4", "--encoders", "standalone,sinks:2"),
        *("--json", tmp_path / "f.json", "--plot", tmp_path / "f.svg"),
    )
    assert result.exit_code == 0, result.output
    frame = json.loads((tmp_path / "f.json").read_text())
    assert (frame["bench"], frame["seed"]) == ("fidelity", 0)
    quality = [r for r in frame["rows"] if r["part"] == "quality"]
    assert {(r["policy"], r["encoder"]) for r in quality} >= {("lego:4", "standalone"), ("lego:4", "sinks:2")}
    assert {r["question_type"] for r in quality} == {"all"}
    assert (tmp_path / "f.svg").exists()
    assert not (tmp_path / "f.json.work").exists()


def test_an_interrupted_command_says_how_to_go_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fidelity, "measure", stop)
    options = ("--policies", "reuse", "--questions-per-type", "1", "--json", tmp_path / "f.json")
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
        (("--sweep", "haystack"), "unknown sweep 'haystack'"),
        (("--dtype", "int3"), "unknown dtype"),
        (("--seed", "-1"), "the seed must be from 0"),
        (("--questions", "/nowhere.jsonl"), "there is no file /nowhere.jsonl; give --questions"),
        (("--questions-per-type", "100000"), "cannot take 100000 questions"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(fidelity, "load_model", None)
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--encoders", "standalone,backwards"), "unknown encoder 'backwards'"),
        (("--encoders", ","), "at least one encoder"),
        (("--model", "/nowhere"), "cannot load the model"),
    ],
)
def test_bad_encoders_are_refused_before_any_work(
    home: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(fidelity, "_Run", None)
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_sweep_is_made_of_the_sample_world(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "Q?", "chunks": ["c"], "answer": "A"}\n')
    result = command("--questions", path, "--sweep", "needle")
    assert result.exit_code == 2
    assert "leave out --questions" in result.output
