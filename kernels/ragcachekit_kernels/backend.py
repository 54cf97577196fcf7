"""Choice between the Triton kernels and torch, per device."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache

import torch

SETTING = "RAGCACHEKIT_KERNELS"
"""Environment variable: ``auto`` (default), ``torch`` (never Triton) or ``triton``.

``triton`` includes CPUs, in Triton's interpreter only (``TRITON_INTERPRET=1``; slow, for tests)."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types that the kernels compute with."""


def uses_triton(device: torch.device) -> bool:
    """Whether tensors on ``device`` go to the Triton kernels, as far as these support the case.

    Never on devices other than ``cuda`` and ``cpu``: MPS, for one, takes the torch path.

    Raises
    ------
    ValueError
        If the environment variable has an unknown value, or asks for Triton where it cannot run.
    """
    wanted = os.environ.get(SETTING, "auto")
    if wanted not in ("auto", "torch", "triton"):
        raise ValueError(f"{SETTING}={wanted!r} is not known; use auto, torch or triton")
    if wanted == "torch" or device.type not in ("cuda", "cpu"):
        return False
    if wanted == "auto":
        return device.type == "cuda" and _available()
    if not _available():
        raise ValueError(f"{SETTING}=triton, but Triton is not installed, or this is not Linux")
    if device.type == "cpu" and not interpreted():
        raise ValueError(f"{SETTING}=triton on a CPU needs TRITON_INTERPRET=1, set before triton is imported")
    return True


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _available() -> bool:
    return sys.platform == "linux" and _installed()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
