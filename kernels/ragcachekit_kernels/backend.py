"""Choice between the Triton kernels and torch, and what the launchers share."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TypeVar

import torch

from ragcachekit_kernels.arguments import AttentionOptions

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

SETTING = "RAGCACHEKIT_KERNELS"
"""Environment variable: ``auto`` (default), ``torch`` (never Triton) or ``triton``.

``triton`` includes CPUs, in Triton's interpreter only (``TRITON_INTERPRET=1``; slow, for tests)."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types that the kernels compute with."""

FUSED = {"enable_fp_fusion": True}
"""Launch option of every kernel: multiplications and additions fuse (Triton 3.9 wants the choice made)."""

LOG2E = 1.4426950408889634
"""Factor that turns natural logits into logits to base 2, which the kernels compute with."""

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


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Context in which ``device`` is the current one: Triton launches on the current device."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def factors(options: AttentionOptions) -> tuple[float, float]:
    """Arguments ``scale`` and ``cap`` of the attention and score kernels.

    With a soft-cap, ``scale`` makes 2x of a product to base 2: cap tanh(x) = cap - 2 cap / (e^2x + 1).
    """
    if options.softcap is None:
        return options.scale * LOG2E, 0.0
    return 2.0 * options.scale / options.softcap * LOG2E, options.softcap * LOG2E


def padded(size: int) -> int:
    """Smallest power of two, from 16 on, that holds ``size`` dimensions."""
    return max(16, 1 << (size - 1).bit_length())


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor with a contiguous last dimension; a copy only where it is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def upcast(dtype: torch.dtype) -> bool:
    """Whether matrix products must widen their operands: the interpreter's bfloat16 products are wrong."""
    return dtype == torch.bfloat16 and interpreted()


def processors(device: torch.device) -> int:
    """Multiprocessors of ``device``; 3 in the interpreter, so that tests divide work among programs."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
