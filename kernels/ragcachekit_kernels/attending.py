"""Attention of rows at arbitrary positions: which implementation computes it.

Part of :mod:`ragcachekit_kernels.dispatch`, which is where to import these from.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ragcachekit_kernels import tiled
from ragcachekit_kernels.backend import uses_triton
from ragcachekit_kernels.fallback import attempt, refusal
from ragcachekit_kernels.rows import DeviceRows, KVTable, Rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def attention_choice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    """Which implementation these tensors go to: ``triton``, ``torch``, or ``torch: `` and why not Triton."""
    if not uses_triton(key.device):
        return "torch"
    if len({query.dtype, key.dtype, value.dtype}) > 1 or key.dtype not in DTYPES:
        return f"torch: {query.dtype} over {key.dtype} and {value.dtype}".replace("torch.", "")
    if max(key.shape[2], value.shape[2]) > 256:
        return f"torch: head_dim {max(key.shape[2], value.shape[2])} is more than 256"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        return "torch: gradients are asked for"
    if key.stride(2) != 1 or value.stride(2) != 1:
        return "torch: the last dimension of keys or values is not contiguous"
    refused = refusal(_case(key, value))
    return f"torch: {refused}" if refused else "triton"


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of rows at ascending ``positions`` over keys ``0..tokens-1``.

    Shapes and arguments as in :func:`ragcachekit_kernels.reference.sparse_attention`. :class:`Rows` are
    checked and put on the device once, however many calls they serve. Rows of one tile (neighbours in
    ``positions``) share what they load: keys up to the tile's last position must hold numbers, for a NaN
    among the values spreads through its weight of zero. On a GPU the result is a view of ``[rows, heads,
    value_head_dim]``.

    Raises
    ------
    ValueError
        If the positions are not ascending or lie outside the keys, the heads do not divide, or the window,
        soft-cap or scale is not positive.
    """
    rows = _rows(query, key, positions)
    options = attention_options(scale, window, softcap, sinks)
    if not rows:
        return query.new_empty(query.shape[0], 0, value.shape[-1])
    in_torch = partial(tiled.sparse_attention, query, key, value, rows.positions, **options)
    if attention_choice(query, key, value) != "triton":
        return in_torch()
    from ragcachekit_kernels import row_attention

    kernel = partial(row_attention.attention, query, key, value, rows.on(key.device), **options)
    return attempt(_case(key, value), lambda: kernel()[0], in_torch)


def sparse_attention_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`sparse_attention`; and ``[heads, rows]`` log-sum-exps of the scores.

    They are natural logarithms with the sinks included, float32 or wider.
    """
    rows = _rows(query, key, positions)
    options = attention_options(scale, window, softcap, sinks)
    if not rows:
        wide = torch.promote_types(query.dtype, torch.float32)
        nothing = query.new_empty(query.shape[0], 0, value.shape[-1])
        return nothing, nothing.new_empty(query.shape[0], 0, dtype=wide)
    in_torch = partial(tiled.sparse_attention_lse, query, key, value, rows.positions, **options)
    if attention_choice(query, key, value) != "triton":
        return in_torch()
    from ragcachekit_kernels import row_attention

    kernel = partial(row_attention.attention, query, key, value, rows.on(key.device), **options)
    out, lse = attempt(_case(key, value), partial(kernel, with_lse=True), in_torch)
    assert lse is not None
    return out, lse


def sparse_attention_at(
    query: torch.Tensor,
    table: KVTable,
    layer: int,
    kv_heads: int,
    value_dim: int,
    rows: DeviceRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tokens: int | None = None,
) -> torch.Tensor:
    """:func:`sparse_attention` for captured graphs: rows and where keys and values lie are in device memory.

    Parameters
    ----------
    query : torch.Tensor
        ``[heads, room, head_dim]``, the last dimension contiguous. Rows from the count on are not read.
    table, layer : KVTable, int
        Of ``query``'s dtype; the buffers must reach up to the last row's position.
    kv_heads, value_dim : int
        Shape of those buffers, ``[kv_heads, slots, head_dim]`` and ``[kv_heads, slots, value_dim]``.
    rows : DeviceRows
        With as much room as ``query`` has rows.
    tokens : int, optional
        About how many keys there will be; only the speed depends on it.

    Returns
    -------
    torch.Tensor
        ``[heads, room, value_dim]``, a view of ``[room, heads, value_dim]``; zeros in rows from the count on:
        they go through the rest of the model, where one scale may serve all rows.

    Raises
    ------
    ValueError
        If Triton does not run on this device or the case is not one of its own: there is no other
        implementation that reads addresses from memory.
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
    options = attention_options(scale, window, softcap, sinks)
    from ragcachekit_kernels import row_attention

    return row_attention.attention_at(
        query, table, layer, kv_heads, value_dim, rows, tokens=tokens, **options
    )[0]


def _case(key: torch.Tensor, value: torch.Tensor) -> Hashable:
    return "attention", str(key.device), str(key.dtype), key.shape[2], value.shape[2]


def _rows(query: torch.Tensor, key: torch.Tensor, positions: Sequence[int]) -> Rows:
    if len(positions) != query.shape[1]:
        raise ValueError(f"{query.shape[1]} query rows but {len(positions)} positions")
    if query.shape[0] % key.shape[0]:
        raise ValueError(f"{query.shape[0]} query heads cannot share {key.shape[0]} KV heads")
    known = isinstance(positions, Rows) or all(a < b for a, b in pairwise(positions))
    if not known or (len(positions) and not 0 <= positions[0] <= positions[-1] < key.shape[1]):
        raise ValueError(f"positions must be ascending within 0..{key.shape[1] - 1}")
    return positions if isinstance(positions, Rows) else Rows(tuple(positions))


def attention_options(
    scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> dict[str, Any]:
    """Keyword arguments of every implementation; ValueError if one of them is not positive."""
    if scale <= 0 or (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(f"scale {scale}, window {window} and softcap {softcap} must be positive")
    return {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
