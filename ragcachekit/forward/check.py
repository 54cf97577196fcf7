"""Checks of a model on itself: two computations of the same tensor must agree as far as rounding allows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ragcachekit.errors import ModelNotSupported, RagCacheError
from ragcachekit.forward.decode import RequestKV, decode

PROMPTS, STEPS = (17, 12), 3
"""Tokens of the batch check's prompts, beyond the windows of test models, and decoded after each."""


def tolerance_for(dtype: torch.dtype, layers: int = 16) -> float:
    """Allowed relative difference: rounding of two different orders of the same sums.

    In half precision it grows with the root of the ``layers``, where they are given, as rounding does: 32
    random layers in bfloat16 differed from themselves at another position by 0.060 on an H100. On a CPU it
    was 0.015, and the allowance for 16 layers is enough.
    """
    if dtype in (torch.float32, torch.float64):
        return 1e-4
    return 6e-2 * math.sqrt(max(1.0, layers / 16))


def compare(ours: Tensor, theirs: Tensor, tolerance: float, what: str, why: str = "") -> float:
    """The difference of two ``[..., rows, dim]``, relative to the largest value.

    ModelNotSupported, which begins with ``what``, if it is above ``tolerance``.
    """
    exact = theirs.dtype in (torch.float32, torch.float64)
    if ours.shape != theirs.shape:
        raise ModelNotSupported(f"{what}: shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    ours, size = ours.to(theirs.device), float(theirs.abs().max()) or 1.0  # chunks are encoded to the host
    rows = (ours.float() - theirs.float()).abs().transpose(-2, 0).flatten(1).amax(1) / size
    # In half precision a router that is undecided between two experts sends a token or two another way,
    # which is no error of linking; a wrong rotation, mask or scale shows in most rows.
    difference = float(rows.max() if exact else rows.median())
    if not difference <= tolerance:
        raise ModelNotSupported(
            f"{what} differ from the model's own by {difference:.2g} of the largest value "
            f"(allowed {tolerance:.0e}){why if exact else ''}"
        )
    return difference


@torch.no_grad()
def why_not_together(model: Any) -> str | None:
    """Why the model cannot decode several requests in one forward, or None.

    Two random prompts are decoded together, and their logits compared with those of a forward of each alone.
    """
    vocab, draw = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(1)
    ids = [torch.randint(vocab, (count + STEPS,), generator=draw).tolist() for count in PROMPTS]
    caches, expected = [DynamicCache() for _ in ids], []
    try:
        for own, cache in zip(ids, caches, strict=True):
            out = model(torch.tensor([own], device=model.device), past_key_values=cache, use_cache=True)
            expected.append(out.logits[0, -STEPS:])
        requests = [RequestKV(cache, count, STEPS) for cache, count in zip(caches, PROMPTS, strict=True)]
        steps = [decode(model, requests, [own[at] for own in ids]) for at in range(-STEPS, 0)]
        for item, alone in enumerate(expected):
            ours = torch.stack([logits[item] for logits in steps])
            compare(ours, alone, tolerance_for(model.dtype), "logits of requests decoded together")
    except (RagCacheError, RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
        return f"{type(model).__name__} cannot decode requests together: {error}"
    return None
