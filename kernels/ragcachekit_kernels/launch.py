"""What the Triton launchers share."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ragcachekit_kernels.arguments import AttentionOptions

FUSED = {"enable_fp_fusion": True}
"""Launch option of every kernel: multiplications and additions fuse (Triton 3.9 wants the choice made)."""

LOG2E = 1.4426950408889634
"""Factor that turns natural logits into logits to base 2, which the kernels compute with."""


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


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


def dense(tensor: Tensor) -> Tensor:
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
