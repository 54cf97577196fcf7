"""The log of questions that `estimate` reads."""

import json

import pytest

from ragcachekit.commands.estimate import LoggedQuestion, read_log


@pytest.fixture
def log(tmp_path):
    def write(*lines):
        path = tmp_path / "log.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return write


def test_questions_as_objects_and_as_they_stand(log):
    path = log({"question": "Where?", "chunks": ["a.txt#0", "Some text."], "user": "me"}, "", "Why?")
    assert read_log(path) == (
        LoggedQuestion(1, "Where?", ("a.txt#0", "Some text.")),
        LoggedQuestion(3, "Why?"),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"', "Expecting"),
        ({"query": "a"}, '"question" must be'),
        ({"question": ""}, '"question" must be'),
        ({"question": "a", "chunks": "b"}, '"chunks" must be'),
        ({"question": "a", "chunks": [1]}, '"chunks" must be'),
    ],
)
def test_a_bad_line_is_named(log, line, message):
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        read_log(log("fine", line))


def test_an_empty_log_says_what_to_write(log):
    with pytest.raises(ValueError, match="holds no question; write one per line"):
        read_log(log("", ""))
