"""Sparse-row attention: choice of the implementation. Import from :mod:`ragcachekit_kernels.dispatch`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ragcachekit_kernels.attention import tiled
from ragcachekit_kernels.backend import attempt, case_of, choice
from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import DeviceRows, KVTable, checked_rows


def attention_choice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    """Implementation for these tensors: ``triton``, ``torch``, or ``torch: `` and why not Triton."""
    found = choice("attention", query, key, value)
    if found == "triton" and (key.stride(2) != 1 or value.stride(2) != 1):
        return "torch: the last dimension of keys or values is not contiguous"
    return found


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: Sequence[int],
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of rows at ascending ``positions``: row i sees exactly keys ``0..positions[i]``.

    ``query`` is ``[heads, rows, head_dim]``; ``key`` and ``value`` are ``[kv_heads, tokens, head_dim]``, key
    j at position j, and heads is a multiple of kv_heads. Returns ``[heads, rows, value_head_dim]``, on a
    GPU a view of ``[rows, heads, value_head_dim]``. :class:`Rows` are checked and put on the device once,
    however many calls use them. ValueError for positions that do not ascend or lie outside the keys.

    All keys and values up to a row's position must be finite, those that a neighbouring row sees too: a
    weight of zero times NaN is NaN. EPIC section 4.2 prints a multiplicative mask; this one is additive.
    """
    rows = checked_rows(query, key, positions)
    in_torch = partial(tiled.attend, query, key, value, rows.positions, options)
    if not rows or attention_choice(query, key, value) != "triton":
        return in_torch()
    from ragcachekit_kernels.attention import row_attention

    kernel = partial(row_attention.attention, query, key, value, rows.on(key.device), options)
    return attempt(case_of("attention", key, value), kernel, in_torch)


def sparse_attention_at(
    query: torch.Tensor,
    table: KVTable,
    layer: int,
    kv_heads: int,
    value_dim: int,
    rows: DeviceRows,
    options: AttentionOptions,
    *,
    tokens: int,
) -> torch.Tensor:
    """Sparse-row attention for captured graphs: row positions and KV addresses are read from device memory.

    Parameters
    ----------
    query : torch.Tensor
        ``[heads, room, head_dim]``, the last dimension contiguous. Rows from the count on are not read.
    table, layer : KVTable, int
        Table of ``query``'s dtype; its buffers must reach up to the last row's position.
    kv_heads, value_dim : int
        Shape of those buffers, ``[kv_heads, slots, head_dim]`` and ``[kv_heads, slots, value_dim]``.
    rows : DeviceRows
        With as much room as ``query`` has rows.
    options : AttentionOptions
    tokens : int
        Approximate number of keys; only the speed depends on it.

    Returns
    -------
    torch.Tensor
        ``[heads, room, value_dim]``, a view of ``[room, heads, value_dim]``. Rows from the count on are
        zeros: the rest of the model computes them too, and one quantisation scale may cover all rows.

    Raises
    ------
    ValueError
        If Triton does not run on this device or its kernel does not support the case: no other
        implementation reads addresses from memory.
    """
    table.check(query)
    if query.dtype != table.dtype or max(query.shape[2], value_dim) > 256:
        raise ValueError(
            f"attention through a KV table needs one type and head_dim up to 256, got {query.dtype} over "
            f"{table.dtype}, {query.shape[2]} and {value_dim}"
        )
    if rows.room != query.shape[1] or query.shape[0] % kv_heads:
        raise ValueError(
            f"a query of shape {tuple(query.shape)} does not fit {rows.room} rows, {kv_heads} heads"
        )
    from ragcachekit_kernels.attention import row_attention

    at = (table, layer, kv_heads, value_dim, rows)
    return row_attention.attention_at(query, *at, options, tokens=tokens)
