"""The command line on the sample model, by its name."""

import pytest
from texts import DOCUMENTS, QUESTIONS
from typer.testing import CliRunner

from ragcachekit.commands.app import app


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_ask_reuses_what_precompute_encoded(folder, corpus, tmp_path):
    mine = ("--corpus", corpus, "--model", "sample", "--cache", tmp_path / "cache")
    run("precompute", *mine)
    output = run("ask", *mine, "--max-new-tokens", "8", "--k", "2", QUESTIONS[0])
    assert "disk" in output


def test_ttft_and_the_folder(folder):
    small = ("--prompt-tokens", "200", "--chunk-tokens", "60", "--question-tokens", "8", "--runs", "1")
    assert "sample" in run("bench", "ttft", "--model", "sample", *small)
    assert str(folder) in run("sample-model").replace("\n", "")
