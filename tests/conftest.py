"""What must hold before the first test: Triton's interpreter where there is no GPU, Ctrl-C, a small heap."""

import asyncio
import atexit
import gc
import os
import signal
import sys
import warnings
from contextlib import suppress

import pytest

WORKER = "PYTEST_XDIST_WORKER" in os.environ
if WORKER:
    atexit.register(os._exit, 0)  # after all others: to free every module takes seconds

if WORKER or "-n" not in sys.argv:  # a process that only hands out tests imports no torch
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background jobs ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)


gc.disable()  # while everything is imported


def pytest_collection_finish() -> None:
    """Have no collection walk the million objects of imported modules and collected tests again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    if not WORKER:
        gc.disable()
        gc.unfreeze()  # else triton reports at exit that what it made was not freed


@pytest.fixture(scope="session", autouse=True)
def _no_event_loop_between_tests() -> None:
    """LlamaIndex makes one where none was ever set, and leaves it open; else it runs and closes its own."""
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.get_event_loop_policy().get_event_loop().close()
    asyncio.set_event_loop(None)


@pytest.fixture(params=["torch", "triton"])
def path(request, monkeypatch):
    """Both ways through the kernels: in torch, and in Triton (interpreted on a CPU, compiled on a GPU)."""
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", request.param)
    return request.param


@pytest.fixture
def triton(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
