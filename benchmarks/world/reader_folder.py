"""The reader: the small model that was trained on worlds like the sample world, and can read nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

READER = str(Path(__file__).with_name("reader"))
"""Its folder."""

READER_NAME = "the trained reader of the repository"
"""What reports call it."""

ANSWER_TOKENS = 16
"""Longer than any of its answers."""


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread for the reader, whose tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
