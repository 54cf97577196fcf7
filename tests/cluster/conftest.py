"""The command line over a small corpus, and the kits for the processes that Ray starts."""

import os
import sys

import pytest

from command_fixtures import command, corpus, world  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def _kits_for_other_processes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        yield
