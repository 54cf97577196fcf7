"""The demo on the sample model, killed in the middle and continued."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from benchmarks.demo import first_token
from benchmarks.demo import run as demo
from benchmarks.demo.corpus import Settings
from benchmarks.demo.engines import LIBRARY
from benchmarks.demo.first_token import STATES
from benchmarks.demo.score import PART
from ragcachekit.commands.sample_model import sample_model

SMALL = Settings(
    questions=2,
    timed=1,
    chunks=12,
    wordpieces=90,
    vectors=50,
    k=2,
    max_tokens=4,
    modules=("heapq", "textwrap"),
)
PROGRAM = """
import sys
from pathlib import Path
from benchmarks.demo.corpus import Settings
from benchmarks.demo.run import run
run(eval(sys.argv[1]), Path(sys.argv[2]), progress=False)
"""
SECONDS = 200


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder in which the demo was killed after its first answer."""
    sample_model()
    folder = tmp_path_factory.mktemp("demo")
    work = folder / demo.WORK
    command = [sys.executable, "-c", PROGRAM, repr(SMALL), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + SECONDS
        while not work.exists() or len(work.read_text().splitlines()) < 2:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    assert not (folder / demo.RESULTS).exists()
    return folder


@pytest.fixture(scope="module")
def killed(out):
    """The work file's lines at that time."""
    return out.joinpath(demo.WORK).read_text().splitlines()


@pytest.fixture(scope="module")
def report(out, killed):
    return demo.run(SMALL, out, progress=False)


def test_the_demo_continues_where_it_was_killed(out, killed, report):
    assert 2 <= len(killed) <= 3  # the second answer may have come in between
    lines = out.joinpath(demo.WORK).read_text().splitlines()
    assert lines[: len(killed)] == killed
    parts = [json.loads(line)["part"] for line in lines[1:]]
    assert parts == [PART, PART, "first token"]
    assert not (out / "kv").exists()


def test_every_part_has_its_figures(out, report):
    answers = report.part(PART).rows
    assert len(answers) == 2
    for row in answers:
        assert row["full"]
        assert row["cached"]
        assert row["kl"] >= 0
        assert row["prompt_tokens"] > row["reused_tokens"] > 0.5 * row["prompt_tokens"]
    (quality,) = report.part("quality").rows
    assert quality["n"] == 2
    assert quality["policy"] == LIBRARY.get("policy", quality["policy"])
    times = {row["state"]: row for row in report.part("first token").rows}
    assert tuple(times) == STATES
    assert times["full"]["reused_tokens"] == times["cold"]["reused_tokens"] == 0
    assert (
        times["host"]["reused_tokens"] == times["disk"]["reused_tokens"] == times["restart"]["reused_tokens"]
    )
    (queries,) = report.part("query cache").rows
    assert queries["n"] == 8
    assert queries["right"] + queries["wrong"] == queries["hits"]
    assert json.loads(out.joinpath(demo.RESULTS).read_text())["rows"] == json.loads(json.dumps(report.rows))
    assert (out / demo.PICTURE).read_bytes()[:4] == b"\x89PNG"


def test_the_header_tells_settings_apart(out, report):
    read = demo.corpus.read(SMALL, out / "cache", False)
    header = json.loads(out.joinpath(demo.WORK).read_text().splitlines()[0])
    assert demo._header(SMALL, read) == header
    assert demo._header(replace(SMALL, timed=2), read) == header
    assert demo._header(replace(SMALL, max_tokens=5), read) != header


def test_a_finished_demo_answers_nothing_again(out, report, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("answered again")

    monkeypatch.setattr(demo, "answer", refuse)
    monkeypatch.setattr(first_token, "timed_engines", refuse)
    assert demo.run(SMALL, out, progress=False).part(PART).rows == report.part(PART).rows
