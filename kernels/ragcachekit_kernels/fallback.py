"""Fallback to torch for a Triton kernel that the compiler or the device refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from ragcachekit_kernels.backend import DTYPES, uses_triton

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

# Per process, like Triton's own cache: without it, a refused kernel would be compiled again at each call.
_refused: dict[Hashable, str] = {}


def refusal(case: Hashable) -> str | None:
    """Reason why this case goes to torch, None if it does not."""
    return _refused.get(case)


def choice(case: Hashable, query: torch.Tensor, *others: torch.Tensor) -> str:
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
    refused = refusal(case)
    return f"torch: {refused}" if refused else "triton"


def attempt(case: Hashable, kernel: Callable[[], Result], instead: Callable[[], Result]) -> Result:
    """Result of ``kernel``, or of ``instead`` if Triton cannot compile or launch the kernel.

    A refused ``case`` (the properties that the kernel is compiled for) is logged once and goes to ``instead``
    from then on. ``instead`` must be correct after a partial launch of ``kernel``.
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
