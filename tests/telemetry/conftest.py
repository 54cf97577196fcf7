"""A tiny engine that reads text, and prompts with chunks that are cached after the first request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcachekit import Chunk, Prompt, RagCache, Text
from speaking import byte_level, speaker

CHUNKS = (
    "Berlin is the capital of Germany. The river Spree flows in Berlin.",
    "Paris is the capital of France; the river Seine flows in Paris.",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where passed checks of the model are kept, so that it is checked once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def rag(folder: Path) -> Iterator[RagCache]:
    with RagCache(
        speaker(), byte_level(), cold="now", policy="lego:4", encoder="standalone", cache_dir=folder
    ) as rag:
        yield rag


@pytest.fixture
def prompt() -> Prompt:
    return Prompt([Text("Context:\n"), *map(Chunk, CHUNKS), Text("\nWhere does the river flow?")])
