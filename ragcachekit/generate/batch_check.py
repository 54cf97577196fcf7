"""The check of a batch: does it give, on the model itself, what the model computes for each prompt alone?"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from ragcachekit.errors import RagCacheError
from ragcachekit.forward.agreement import compare, tolerance_for
from ragcachekit.forward.batch import RequestKV, decode

PROMPTS, STEPS = (17, 12), 3
"""Tokens of the check's prompts, beyond the windows of test models, and of what is decoded after each."""


@torch.no_grad()
def why_not_together(model: Any) -> str | None:
    """Why the model cannot decode several requests in one forward, or None.

    Two random prompts are decoded together, and their logits compared with those of a forward of each alone.
    """
    vocab, draw = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(1)
    ids = [torch.randint(vocab, (count + STEPS,), generator=draw).tolist() for count in PROMPTS]
    try:
        alone = [_forward(model, own) for own in ids]
        requests = [RequestKV(cache, count, STEPS) for (_, cache), count in zip(alone, PROMPTS, strict=True)]
        steps = [decode(model, requests, [own[at] for own in ids]) for at in range(-STEPS, 0)]
        for item, (expected, _) in enumerate(alone):
            ours = torch.stack([logits[item] for logits in steps])
            compare(ours, expected, tolerance_for(model.dtype), "logits of requests decoded together")
    except (RagCacheError, RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
        return f"{type(model).__name__} cannot decode requests together: {error}"
    return None


def _forward(model: Any, ids: list[int]) -> tuple[torch.Tensor, DynamicCache]:
    """Logits of the decoded tokens, and the cache of all."""
    cache, on_device = DynamicCache(), torch.tensor([ids], device=model.device)
    out = model(input_ids=on_device, past_key_values=cache, use_cache=True)
    return out.logits[0, -STEPS:], cache
