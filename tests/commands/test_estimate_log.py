"""The log of questions that `estimate` reads."""

import json

import pytest

from ragcachekit.commands.estimate.log import LoggedQuery, read_log


@pytest.fixture
def log(tmp_path):
    def write(*lines):
        path = tmp_path / "log.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return write


def test_questions_as_objects_and_as_they_stand(log):
    path = log(
        {"query": "Where?", "docs": ["a.txt#0", "Some text."], "answer_tokens": 7, "user": "me"}, "", "Why?"
    )
    assert read_log(path) == (
        LoggedQuery(1, "Where?", ("a.txt#0", "Some text."), None, 7),
        LoggedQuery(3, "Why?"),
    )


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "log").write_bytes(b'\xef\xbb\xbf{"query": "Where?"}\r\n')
    assert read_log(tmp_path / "log") == (LoggedQuery(1, "Where?"),)


def test_times_are_seconds_or_iso_and_give_the_order(log):
    late = {"query": "late", "time": "1970-01-01T00:02:00Z"}
    found = read_log(log(late, {"query": "early", "time": 60}))
    assert [(query.query, query.time) for query in found] == [("early", 60.0), ("late", 120.0)]


def test_if_a_time_is_missing_the_file_gives_the_order(log):
    found = read_log(log({"query": "a", "time": 9}, {"query": "b", "time": 1}, "c"))
    assert [query.query for query in found] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"query": "a"', "no JSON"),
        ({"question": "a"}, '"query" must be'),
        ({"query": ""}, '"query" must be'),
        ({"query": "a", "docs": "b"}, '"docs" must be'),
        ({"query": "a", "docs": [1]}, '"docs" must be'),
        ({"query": "a", "answer_tokens": -1}, '"answer_tokens" must be'),
        ({"query": "a", "answer_tokens": True}, '"answer_tokens" must be'),
        ({"query": "a", "time": "yesterday"}, '"time" must be'),
        ({"query": "a", "time": [1]}, '"time" must be'),
    ],
)
def test_a_bad_line_is_named(log, line, message):
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        read_log(log("fine", line))


def test_what_is_no_text_is_named(tmp_path):
    (tmp_path / "log").write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"line 2: .*decode"):
        read_log(tmp_path / "log")


def test_an_empty_log_says_what_to_write(log):
    with pytest.raises(ValueError, match="holds no question; write one per line"):
        read_log(log("", ""))
