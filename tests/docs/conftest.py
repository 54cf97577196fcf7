"""A tiny model in a folder, and a cache folder of its own for all programs that the documentation shows."""

import asyncio
from pathlib import Path

import pytest

from speaking import byte_level, speaker


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for ``--model``: random weights, a byte-level tokenizer, a chat template."""
    folder = tmp_path_factory.mktemp("tiny-model")
    speaker(max_position_embeddings=16384).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands for the user's home: passed checks and digests are made once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``~`` and the user's cache folder lie in a temporary folder."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    return home


@pytest.fixture
def no_loop() -> None:
    """No event loop, as in a program: LlamaIndex then closes the one that it makes."""
    asyncio.set_event_loop(None)
