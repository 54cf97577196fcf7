"""Engines that speak, closed behind the test."""

from contextlib import ExitStack

import pytest

from engine_kit import checked
from ragcachekit import RagCache
from speaking import byte_level, speaker


@pytest.fixture
def opened(tmp_path):
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            RagCache(speaker(), byte_level(), **{"cache_dir": checked(tmp_path / "cache"), **options})
        )
