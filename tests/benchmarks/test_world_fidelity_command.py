"""``python -m benchmarks fidelity`` over the sample world."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from ragcachekit.commands import fidelity


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "lego:4,fastest"), "unknown policy 'fastest'"),
        (("--seed", "-1"), "the seed must be from 0"),
        (("--questions-per-type", "100000"), "cannot take 100000 questions"),
    ],
)
def test_bad_arguments_are_refused_before_the_reader_is_loaded(monkeypatch, arguments, message):
    monkeypatch.setattr(fidelity, "load_checked", None)
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.output
