"""One forward with one new token of every request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ragcachekit.errors import ModelChanged
from ragcachekit.forward.attention import is_installed
from ragcachekit.forward.batch.cache import BatchCache
from ragcachekit.forward.batch.request_kv import RequestKV


@torch.no_grad()
def decode(model: Any, requests: Sequence[RequestKV], new: Sequence[int]) -> torch.Tensor:
    """Logits ``[requests, vocab]`` after the ``new`` token of each, whose KV is added to the request's.

    If the forward fails, the requests are as they were. ModelChanged where the model attends by other code
    than ours, which would see the new rows alone.
    """
    if not is_installed(model):
        raise ModelChanged("the model's attention was exchanged while requests were decoded")
    for request in requests:
        request.make_room()
    out = model(
        input_ids=torch.tensor(new, device=model.device)[:, None],
        position_ids=torch.tensor([[request.rows] for request in requests], device=model.device),
        past_key_values=BatchCache(requests),
        use_cache=True,
    )
    for request in requests:
        request.rows += 1
    return out.logits[:, -1]  # type: ignore[no-any-return]
