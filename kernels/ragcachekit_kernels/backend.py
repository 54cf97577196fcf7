"""Choice between the Triton kernels and torch: per device, and where a kernel is refused."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Hashable
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

SETTING = "RAGCACHEKIT_KERNELS"
"""Environment variable: ``auto`` (default), ``torch`` (never Triton) or ``triton``.

``triton`` includes CPUs, in Triton's interpreter only (``TRITON_INTERPRET=1``; slow, for tests)."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types that the kernels compute with."""

# Per process, like Triton's own cache: without it, a refused kernel would be compiled again at each call.
_refused: dict[Hashable, str] = {}


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


def case_of(kernel: str, *tensors: torch.Tensor) -> Hashable:
    """Name of what a kernel is compiled for: device, types and last dimensions of its tensors."""
    return kernel, str(tensors[0].device), *((str(t.dtype), *t.shape[2:]) for t in tensors)


def refusal(case: Hashable) -> str | None:
    """Reason why this case goes to torch, None if it does not."""
    return _refused.get(case)


def choice(kernel: str, query: torch.Tensor, *others: torch.Tensor) -> str:
    """Implementation for attention of these tensors: ``triton``, ``torch``, or ``torch: `` and why."""
    if not uses_triton(others[0].device):
        return "torch"
    types = [str(t.dtype).removeprefix("torch.") for t in (query, *others)]
    if len(set(types)) > 1 or query.dtype not in DTYPES:
        return f"torch: {types[0]} over {' and '.join(types[1:])}"
    if (width := max(t.shape[2] for t in others)) > 256:
        return f"torch: head_dim {width} is more than 256"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, *others)):
        return "torch: gradients are asked for"
    refused = refusal(case_of(kernel, *others))
    return f"torch: {refused}" if refused else "triton"


def attempt(case: Hashable, kernel: Callable[[], Result], instead: Callable[[], Result]) -> Result:
    """Result of ``kernel``, or of ``instead`` if Triton cannot compile or launch the kernel.

    A refused ``case`` is logged once and goes to ``instead`` from then on. ``instead`` must be correct after
    a partial launch of ``kernel``.
    """
    if case in _refused:
        return instead()
    try:
        return kernel()
    except Exception as error:
        if not _of_compiler(error):
            raise
        reason = f"Triton gave up ({type(error).__name__})"
        if _refused.setdefault(case, reason) is reason:
            _log.warning("%s: torch computes %s from now on: %s", reason, case, str(error)[:500])
    return instead()


def _of_compiler(error: Exception) -> bool:
    """Whether the kernel itself is the cause, not its arguments or the device's state."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    # The passes of the compiler have no class of their own.
    passes = isinstance(error, RuntimeError) and "PassManager::run failed" in str(error)
    return passes or isinstance(error, (CompilationError, OutOfResources, PTXASError))
