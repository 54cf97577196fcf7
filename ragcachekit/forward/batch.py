"""Requests that are decoded together: one forward with a new token of each, over KV of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.errors import ModelChanged
from ragcachekit.forward.attention import is_installed, tagged
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import AttentionOptions

GROWTH = 256
"""Rows that a full buffer grows by: a copy every so many tokens, not memory for all that may come."""


class RequestKV:
    """Per layer, keys and values ``[kv_heads, capacity, head_dim]``, of which the first ``rows`` are written.

    The rows come out of ``cache`` (``[1, kv_heads, tokens, head_dim]`` per layer), whose layers are emptied
    one by one, so that no more than one layer is held twice.
    """

    def __init__(self, cache: Any, rows: int, new: int) -> None:
        self.rows = rows
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        room = rows + min(new, GROWTH)
        for layer in cache.layers:
            self.keys.append(_moved(layer.keys[0], rows, room))
            self.values.append(_moved(layer.values[0], rows, room))
            layer.keys = layer.values = None

    def make_room(self) -> None:
        """Grow full buffers by :data:`GROWTH` rows."""
        if self.rows == self.keys[0].shape[1]:
            for sides in (self.keys, self.values):
                for index, old in enumerate(sides):
                    sides[index] = _moved(old, self.rows, self.rows + GROWTH)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the row after the last one, ``[kv_heads, 1, head_dim]``; ``rows`` counts it later."""
        self.keys[layer].narrow(1, self.rows, 1).copy_(keys)
        self.values[layer].narrow(1, self.rows, 1).copy_(values)

    def as_cache(self) -> Cache:
        """Views of the written rows, ``[1, kv_heads, rows, head_dim]`` per layer."""
        layers = []
        for keys, values in zip(self.keys, self.values, strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[None, :, : self.rows], values[None, :, : self.rows]
            layers.append(layer)
        return Cache(layers=layers)


def _moved(side: torch.Tensor, rows: int, room: int) -> torch.Tensor:
    out = side.new_empty(side.shape[0], room, side.shape[2])
    out[:, :rows] = side[:, :rows]
    return out


class BatchRows(NamedTuple):
    """What one layer attends over: per item of the batch its KV, whose next row is written already."""

    requests: Sequence[RequestKV]
    number: int

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attention ``[batch, 1, heads, value_head_dim]`` of ``query``, ``[batch, heads, 1, head_dim]``.

        ``key`` are the new keys as the model attends over them. ValueError if these are not the ones that it
        put into its cache (multi-head latent attention expands them in between).
        """
        one = self.requests[0].keys[self.number]
        if query.shape[2] != 1 or key.shape[1:] != (one.shape[0], 1, one.shape[2]):
            raise ValueError(f"attention over keys {tuple(key.shape)} with {tuple(one.shape)} in the cache")
        out = []
        for own, request in zip(query, self.requests, strict=True):
            keys, values = request.keys[self.number], request.values[self.number]
            if options.softcap is None and options.sinks is None:
                out.append(_attend(own, keys, values, request.rows + 1, options))
            else:
                out.append(dispatch.sparse_attention(own, keys, values, (request.rows,), options)[:, 0])
        return torch.stack(out)[:, None]


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
        keys = rows.requests[0].keys[rows.number]
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


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int, options: AttentionOptions
) -> torch.Tensor:
    """Query heads that share a KV head are rows of one attention without a mask; ``[heads, dim]``."""
    start = 0 if options.window is None else max(0, rows - options.window)
    out = scaled_dot_product_attention(
        query.reshape(1, key.shape[0], -1, query.shape[-1]),
        key[None, :, start:rows],
        value[None, :, start:rows],
        scale=options.scale,
    )
    return out.reshape(query.shape[0], -1)


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
