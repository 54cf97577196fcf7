"""``ragcachekit doctor`` reads prompts and documents in the forms that chains have them."""

import json

import pytest

from benchmarks.world.reader_folder import READER

ONE = "Berlin is the capital of Germany. The river Spree flows & ends in Berlin."
TWO = "Paris is the capital of France; the river Seine flows in Paris."
CONTENT = f"Answer from the context.\n\n{ONE}\n\n{TWO}\n\nWhere?"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "prompt.txt").write_text(CONTENT)
    (tmp_path / "messages.json").write_text(json.dumps([{"role": "user", "content": CONTENT}]))
    (tmp_path / "request.json").write_text(json.dumps({"messages": [{"role": "user", "content": CONTENT}]}))
    (tmp_path / "escaped.txt").write_text(CONTENT.replace("&", "&amp;"))
    (tmp_path / "docs.jsonl").write_text(f"{json.dumps(ONE)}\n\n{json.dumps({'page_content': TWO})}\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "1.txt").write_text(ONE)
    (folder / "2.txt").write_text(TWO)
    return tmp_path


@pytest.mark.parametrize("documents", ["docs.jsonl", "folder"])
@pytest.mark.parametrize("prompt", ["prompt.txt", "messages.json", "request.json"])
def test_all_found(command, files, prompt, documents):
    model = () if prompt == "prompt.txt" else ("--model", READER)
    result = command("doctor", files / prompt, "-d", files / documents, *model)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("2 of 2 documents are found as chunks")
    assert ("characters of the messages" in result.output) == bool(model)


def test_what_is_missing_is_explained_and_the_exit_code_says_so(command, files):
    result = command("doctor", "-", "-d", files / "docs.jsonl", input=(files / "escaped.txt").read_text())
    assert result.exit_code == 1
    assert "1 of 2 documents" in result.output
    assert "HTML-escaped" in result.output
    assert "autoescape" in result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give the prompt's file"),
        (["prompt.txt"], "there are no documents"),
        (["messages.json", "-d", "folder"], "give --model"),
        (["nothing.txt", "-d", "folder"], "cannot be read"),
        (["prompt.txt", "-d", "nothing.txt"], "cannot be read"),
        (["prompt.txt", "-d", "bad.jsonl"], "line 2"),
        (["prompt.txt", "-d", "number.jsonl"], "page_content or text"),
    ],
)
def test_bad_input(command, files, monkeypatch, arguments, why):
    monkeypatch.chdir(files)
    (files / "bad.jsonl").write_text('"a text that is long enough"\n{"text":\n')
    (files / "number.jsonl").write_text('{"title": "x"}\n')
    result = command("doctor", *arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())
