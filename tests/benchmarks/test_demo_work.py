"""The demo's work file: an interrupted demo continues, other settings start anew."""

import json

import pytest

from benchmarks.demo.work import Work

HEADER = {"version": "1", "settings": "abc"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sub" / "work.jsonl"


def filled(path, header=HEADER):
    with Work(path, header) as work:
        work.put("answer", "Why?", {"text": "because"})
        work.put("answer", "How?", {"text": "so"})


def read(path, header=HEADER):
    with Work(path, header) as work:
        return dict(work.results)


def test_results_are_found_again_and_added_to(path):
    filled(path)
    with Work(path, HEADER) as work:
        assert work.get("answer", "Why?") == {"text": "because"}
        assert work.get("first token", "Why?") is None
        work.put("first token", "Why?", {"ms": 1})
    assert len(read(path)) == 3
    assert json.loads(path.read_text().splitlines()[0]) == HEADER


@pytest.mark.parametrize("header", [{**HEADER, "settings": "other"}, {**HEADER, "version": "2"}])
def test_other_settings_start_anew(path, header):
    filled(path)
    assert read(path, header) == {}
    assert read(path) == {}


def test_a_line_that_was_cut_off_is_dropped_at_every_byte(path):
    filled(path)
    raw = path.read_bytes()
    first = raw.index(b"\n", raw.index(b"\n") + 1) + 1
    for length in range(first, len(raw)):
        path.write_bytes(raw[:length])
        assert list(read(path)) == [("answer", "Why?")]


@pytest.mark.parametrize("text", ["", "no JSON\n", "[1]\n", '{"a": 1}\n{"b": 2}\n', '{"a": 1}\n3\n', "\n"])
def test_a_damaged_file_starts_anew(path, text):
    path.parent.mkdir()
    path.write_text(text)
    assert read(path) == {}
    filled(path)
    assert len(read(path)) == 2
