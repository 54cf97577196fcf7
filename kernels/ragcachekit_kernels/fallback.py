"""Torch in place of a Triton kernel that the compiler or the device refuses: an answer late, not none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import TypeVar

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

# Like Triton's own store of compiled kernels, per process: a kernel that was refused would be compiled anew
# at each call. What is kept follows from the case and the machine alone.
_refused: dict[Hashable, str] = {}


def refusal(case: Hashable) -> str | None:
    """Why Triton was given up for this case, None if it was not."""
    return _refused.get(case)


def attempt(case: Hashable, kernel: Callable[[], Result], instead: Callable[[], Result]) -> Result:
    """What ``kernel`` returns, or ``instead`` if Triton cannot compile or launch it here.

    Parameters
    ----------
    case : hashable
        What the kernel is compiled for. Once refused, it goes to ``instead`` at once; the log says so the
        first time.
    kernel, instead : callable
        Neither may mind that the other has begun: what a launch wrote is written again.
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
    """Whether this says something of the kernel, not of its arguments or of the device's state."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    # The passes of the compiler have no class of their own.
    passes = isinstance(error, RuntimeError) and "PassManager::run failed" in str(error)
    return passes or isinstance(error, (CompilationError, OutOfResources, PTXASError))
