"""Disk tiers that are closed at the end, processes that a test starts, and services that fail."""

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


@pytest.fixture
def said_by():
    """What a script, or a program, in a process of its own writes; it must end well."""

    def run(program, *arguments, seconds=900):
        command = [sys.executable, *([program] if isinstance(program, Path) else ["-c", program])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        done = subprocess.run(
            [*map(str, command), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

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
