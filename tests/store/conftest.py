"""Disk tiers that are closed at the end, processes that a test starts, and services that fail."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest

import store_kit
from ragcachekit.store import remote

HERE = Path(__file__).parent


@pytest.fixture
def opened():
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(closing(store_kit.opened(*args, **options)))


@pytest.fixture(scope="session")
def zygote():
    """A process that has imported torch, and forks those that tests start."""
    command = [sys.executable, HERE / "zygote.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def said_by(zygote, tmp_path_factory):
    """What a script, or a program, in a process of its own writes; it must end well."""

    def run(program, *arguments):
        folder = tmp_path_factory.mktemp("said")
        if not isinstance(program, Path):
            (folder / "program.py").write_text(program)
            program = folder / "program.py"
        zygote.stdin.write(json.dumps([str(program), [*map(str, arguments)], str(folder / "said")]) + "\n")
        zygote.stdin.flush()
        assert zygote.stdout.readline() == "0\n", (folder / "said.err").read_text()
        return (folder / "said.out").read_text()

    return run


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of breakers, which stands still."""
    clock = Clock()
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def patient(monkeypatch):
    """However often it fails, a service is asked again."""
    monkeypatch.setattr(remote, "FAILURES", 10_000)
