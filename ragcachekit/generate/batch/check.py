"""The check of a batch: does it give, on the model itself, what the model computes for each prompt alone?"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from ragcachekit.errors import ModelNotSupported
from ragcachekit.forward.agreement import compare, tolerance_for
from ragcachekit.forward.batch.decode import decode
from ragcachekit.forward.batch.request_kv import RequestKV

PROMPTS = 24, 15
"""Tokens of the check's prompts."""

STEPS = 4


@torch.no_grad()
def why_not_together(model: Any) -> str | None:
    """Why the model cannot decode several requests in one forward, or None.

    Two random prompts are decoded together, and their logits compared with those of a forward of each alone.
    """
    vocab, draw = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(1)
    ids = [torch.randint(vocab, (count + STEPS,), generator=draw).tolist() for count in PROMPTS]
    try:
        requests = [_prefilled(model, own[:-STEPS]) for own in ids]
        steps = [decode(model, requests, [own[at] for own in ids]) for at in range(-STEPS, 0)]
        for item, own in enumerate(ids):
            alone = model(input_ids=torch.tensor([own], device=model.device)).logits[0, -STEPS:]
            ours = torch.stack([logits[item] for logits in steps])
            compare(ours, alone, tolerance_for(model.dtype), "logits of requests decoded together")
    except (ModelNotSupported, RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
        return f"{type(model).__name__} cannot decode requests together: {error}"
    return None


def _prefilled(model: Any, ids: list[int]) -> RequestKV:
    cache = DynamicCache()
    on_device = torch.tensor([ids], device=model.device)
    model.base_model(input_ids=on_device, past_key_values=cache, use_cache=True)
    return RequestKV(cache, len(ids), STEPS)
