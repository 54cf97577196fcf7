"""The benchmarks over a small sample world: shared fixtures."""

import pytest

from benchmarks.demo.corpus import Settings
from command_fixtures import (  # noqa: F401
    command,
    corpus,
    minilm,
    one_minilm,
    prepared,
    proofs,
    reader_copy,
    world,
)
from ragcachekit.model.loading import sample_model


@pytest.fixture(scope="module")
def small_demo():
    """Settings with which a demo takes seconds; the sample model is there."""
    sample_model()
    return Settings(
        questions=2,
        timed=1,
        chunks=12,
        wordpieces=90,
        vectors=50,
        k=2,
        max_tokens=4,
        modules=("heapq", "textwrap"),
    )
