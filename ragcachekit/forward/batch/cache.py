"""The transformers cache of requests that are decoded together, each over KV of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.forward.batch.request_kv import RequestKV
from ragcachekit.forward.tagged_keys import tagged


class BatchRows(NamedTuple):
    """What one layer attends over: per item of the batch its KV, whose next row is written already."""

    requests: Sequence[RequestKV]
    layer: int


class BatchCache(Cache):  # type: ignore[misc]
    """A cache for one forward with one new token of each request, at position ``request.rows``.

    After the forward the caller counts the new rows.
    """

    def __init__(self, requests: Sequence[RequestKV]) -> None:
        layers = range(len(requests[0].keys))
        super().__init__(layers=[_BatchLayer(BatchRows(requests, layer)) for layer in layers])


class _BatchLayer(DynamicLayer):  # type: ignore[misc]
    def __init__(self, rows: BatchRows) -> None:
        super().__init__()
        self._rows = rows
        keys = rows.requests[0].keys[rows.layer]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Rows of the longest request."""
        return max(request.rows for request in self._rows.requests)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No keys: every request attends to all of its own, and no mask is made."""
        return 0, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each request's new row, ``[batch, kv_heads, 1, head_dim]``; the tag has the others."""
        requests, layer = self._rows
        for request, keys, values in zip(requests, key_states, value_states, strict=True):
            request.write(layer, keys, values)
        return tagged(key_states, self._rows), value_states
