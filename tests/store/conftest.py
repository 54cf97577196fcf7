"""Disk tiers that are closed when their test has ended, and processes that a test starts."""

import os
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import store_kit

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
