"""What the launchers of the Triton kernels share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ragcachekit_kernels.backend import interpreted

FUSED = {"enable_fp_fusion": True}
"""Launch option of every kernel: multiplications and additions fuse (Triton 3.9 wants the choice made)."""

LOG2E = 1.4426950408889634
"""Kernels take powers of two: logits are multiplied by this."""


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one while its kernels are launched: Triton launches on the current device.

    Nothing to do on CPUs, and on the GPU that is current already.
    """
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def padded(size: int) -> int:
    """The power of two from 16 on that a tile needs to hold ``size`` dimensions."""
    return max(16, 1 << (size - 1).bit_length())


def upcast(dtype: torch.dtype) -> bool:
    """Whether matrix products must widen their operands: the interpreter's bfloat16 products are wrong."""
    return dtype == torch.bfloat16 and interpreted()


def processors(device: torch.device) -> int:
    """Multiprocessors of ``device``; the interpreter gets a few, so that tests see work shared."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
