"""Which family of kernels runs for a device: the one place that decides it."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

SETTING = "RAGCACHEKIT_KERNELS"
"""Environment variable: ``auto`` (default), ``torch`` (never Triton) or ``triton`` (on CPUs too, where
Triton's interpreter must be on: ``TRITON_INTERPRET=1``, slow, for tests)."""


def uses_triton(device: torch.device) -> bool:
    """Whether tensors on ``device`` go to the Triton kernels (as far as they support the case).

    Raises
    ------
    ValueError
        If the environment variable has another value, or asks for Triton where it cannot run.
    """
    wanted = os.environ.get(SETTING, "auto")
    if wanted not in ("auto", "torch", "triton"):
        raise ValueError(f"{SETTING}={wanted!r} is not known; use auto, torch or triton")
    if wanted == "torch":
        return False
    if wanted == "auto":
        return device.type == "cuda" and _installed()
    if not _installed():
        raise ValueError(f"{SETTING}=triton, but the package triton is not installed")
    if device.type == "cpu" and not interpreted():
        raise ValueError(f"{SETTING}=triton on a CPU needs TRITON_INTERPRET=1, set before triton is imported")
    return True


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
