"""Where there is no GPU, Triton kernels run in its interpreter; that is decided when triton is imported."""

from __future__ import annotations

import asyncio
import os
import warnings
from contextlib import suppress

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _no_event_loop_between_tests() -> None:
    """LlamaIndex makes one where none was ever set, and leaves it open; else it runs and closes its own."""
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.get_event_loop_policy().get_event_loop().close()
    asyncio.set_event_loop(None)
