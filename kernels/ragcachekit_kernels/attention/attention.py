"""Sparse-row attention: choice of the implementation. Import from :mod:`ragcachekit_kernels.dispatch`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import torch

from ragcachekit_kernels.attention import tiled
from ragcachekit_kernels.backend import DTYPES, uses_triton
from ragcachekit_kernels.fallback import attempt, choice
from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import DeviceRows, KVTable, checked_rows


def attention_choice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    """Implementation for these tensors: ``triton``, ``torch``, or ``torch: `` and why not Triton."""
    found = choice(_case(key, value), query, key, value)
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
    """Attention of rows at ascending ``positions`` over keys ``0..tokens-1``.

    Shapes as in :func:`ragcachekit_kernels.reference.sparse_attention`. :class:`Rows` are checked and put
    on the device once, however many calls use them. All keys and values up to a row's position must be
    finite, those that a neighbouring row sees too: a weight of zero times NaN is NaN. On a GPU the result is
    a view of ``[rows, heads, value_head_dim]``.

    Raises
    ------
    ValueError
        If the positions are not ascending or lie outside the keys, or the heads do not divide.
    """
    return _attend(query, key, value, positions, options, with_lse=False)[0]


def sparse_attention_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: Sequence[int],
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result of :func:`sparse_attention` and ``[heads, rows]`` log-sum-exps of the scores.

    They are natural logarithms with the sinks included, float32 or wider.
    """
    out, lse = _attend(query, key, value, positions, options, with_lse=True)
    assert lse is not None
    return out, lse


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: Sequence[int],
    options: AttentionOptions,
    *,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = checked_rows(query, key, positions)
    in_torch = partial(tiled.attend, query, key, value, rows.positions, options, with_lse=with_lse)
    if not rows or attention_choice(query, key, value) != "triton":
        return in_torch()
    from ragcachekit_kernels.attention import row_attention

    arguments = (query, key, value, rows.on(key.device), options)
    return attempt(
        _case(key, value), lambda: row_attention.attention(*arguments, with_lse=with_lse), in_torch
    )


def sparse_attention_at(
    query: torch.Tensor,
    table: KVTable,
    layer: int,
    kv_heads: int,
    value_dim: int,
    rows: DeviceRows,
    options: AttentionOptions,
    *,
    tokens: int | None = None,
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
    tokens : int, optional
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
    if not uses_triton(query.device):
        raise ValueError(f"attention through a KV table needs Triton, which does not run on {query.device}")
    if query.dtype != table.dtype or query.dtype not in DTYPES or max(query.shape[2], value_dim) > 256:
        raise ValueError(
            f"attention through a KV table needs one type of bfloat16, float16 or float32 and head_dim up "
            f"to 256, got {query.dtype} over {table.dtype}, {query.shape[2]} and {value_dim}"
        )
    if rows.room != query.shape[1] or query.shape[0] % kv_heads:
        raise ValueError(
            f"a query of shape {tuple(query.shape)} does not fit {rows.room} rows, {kv_heads} heads"
        )
    from ragcachekit_kernels.attention import row_attention

    at = (table, layer, kv_heads, value_dim, rows)
    return row_attention.attention_at(query, *at, options, tokens=tokens)[0]


def _case(key: torch.Tensor, value: torch.Tensor) -> Hashable:
    return "attention", str(key.device), str(key.dtype), key.shape[2], value.shape[2]
