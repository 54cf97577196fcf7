"""Attention of requests that are decoded together: one new row each, over keys of its own."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ragcachekit.forward.batch.cache import BatchRows
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import AttentionOptions


def attend_each(
    query: torch.Tensor, key: torch.Tensor, rows: BatchRows, options: AttentionOptions
) -> torch.Tensor:
    """Attention ``[batch, 1, heads, value_head_dim]`` of ``query``, ``[batch, heads, 1, head_dim]``.

    ``key`` are the new keys as the model attends over them. ValueError if these are not the ones that it
    put into its cache (multi-head latent attention expands them in between).
    """
    requests, layer = rows
    one = requests[0].keys[layer]
    if query.shape[2] != 1 or key.shape[1:] != (one.shape[0], 1, one.shape[2]):
        raise ValueError(f"attention over keys {tuple(key.shape)} with {tuple(one.shape)} in the cache")
    attend = _attend if options.softcap is None and options.sinks is None else _attend_by_kernel
    out = [
        attend(own, request.keys[layer], request.values[layer], request.rows + 1, options)
        for own, request in zip(query, requests, strict=True)
    ]
    return torch.stack(out)[:, None]


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


def _attend_by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int, options: AttentionOptions
) -> torch.Tensor:
    return dispatch.sparse_attention(query, key, value, (rows - 1,), options)[:, 0]
