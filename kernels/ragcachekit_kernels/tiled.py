"""Sparse-row attention in tiles of neighbouring rows, for CPUs: batched matmuls on truncated keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ragcachekit_kernels.context import ContextMass

TILE_ROWS = 128
"""Rows of a tile: bounds both the score buffer and the masked triangle of contiguous rows."""

GAP = 32
"""A tile ends where the next row is further away: computing its keys for all rows would cost more."""


def tiles(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Half-open row ranges of one tile each; ``positions`` must be ascending."""
    start = 0
    for row in range(1, len(positions) + 1):
        full = row - start == TILE_ROWS
        if row == len(positions) or full or positions[row] - positions[row - 1] > GAP:
            yield start, row
            start = row


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
    """As :func:`ragcachekit_kernels.reference.sparse_attention`, ``positions`` ascending.

    Keys after a tile's last position are never touched, and query heads that share a KV head are
    folded into one matmul: masked SDPA computes every row against every key (1.6-2.4 times the
    work on a CPU).
    """
    kv_heads = key.shape[0]
    heads, rows, head_dim = query.shape
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, head_dim)
    out = query.new_empty(kv_heads, heads // kv_heads, rows, value.shape[-1])
    for start, stop in tiles(positions):
        out[:, :, start:stop] = _tile(
            grouped[:, :, start:stop], key, value, positions[start:stop], scale, window, softcap, sinks
        )
    return out.reshape(heads, rows, value.shape[-1])


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
    """As :func:`ragcachekit_kernels.reference.sparse_attention_lse`, ``positions`` ascending."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    out = sparse_attention(query, key, value, positions, sinks=sinks, **options)
    kv_heads = key.shape[0]
    heads, rows, head_dim = query.shape
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, head_dim)
    lse = query.new_empty(grouped.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    for start, stop in tiles(positions):
        scores, _ = _tile_scores(grouped[:, :, start:stop], key, positions[start:stop], **options)
        lse[:, :, start:stop] = torch.logsumexp(scores, -1).view(*grouped.shape[:2], -1)
    lse = lse.reshape(heads, rows)
    return out, lse if sinks is None else torch.logaddexp(lse, sinks.to(lse)[:, None])


def column_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: Sequence[int],
    spans: Sequence[tuple[int, int]] | None = None,
    *,
    lse: torch.Tensor | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`ragcachekit_kernels.reference.column_scores`, ``positions`` ascending.

    One tile of rows at a time: never more than ``TILE_ROWS`` rows of scores in memory.
    """
    kv_heads, tokens = key.shape[:2]
    heads, rows, head_dim = query.shape
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, head_dim)
    out = torch.zeros(tokens, dtype=torch.promote_types(query.dtype, torch.float32), device=key.device)
    for start, stop in tiles(positions):
        tile, where = grouped[:, :, start:stop], positions[start:stop]
        scores, low = _tile_scores(tile, key, where, scale, window, softcap)
        if lse is not None:
            known = lse.to(scores.dtype).reshape(kv_heads, heads // kv_heads, rows)[:, :, start:stop]
            weights = torch.exp(scores - known.reshape(kv_heads, -1, 1))
            out[low : low + scores.shape[-1]] += weights.sum((0, 1))
            continue
        if spans is None:
            out[low : low + scores.shape[-1]] += _weights(scores, stop - start, sinks).sum((0, 1))
            continue
        for left, right in spans:
            left, right = max(left - low, 0), min(right - low, scores.shape[-1])
            if left < right:
                weights = torch.softmax(scores[..., left:right], -1)
                out[low + left : low + right] += weights.nan_to_num_(0.0).sum((0, 1))
    return out


def context_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: Sequence[int],
    lengths: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> ContextMass:
    """As :func:`ragcachekit_kernels.dispatch.context_mass`.

    Attention over a value that says which segment a key belongs to is attention per segment, in the same
    blocks and under the same masks as any other attention.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(wide), key.to(wide)
    member = torch.repeat_interleave(torch.eye(len(lengths)), torch.tensor(lengths), 0).to(key)
    value = member.expand(key.shape[0], -1, -1)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    mixed = sparse_attention(query, key, value, positions, **options)
    mass = mixed.sum(0).float()
    columns = column_scores(query, key, positions, **options)
    return ContextMass(columns.float(), mass[:, :-1].sum(0), mass[:, -1].sum(), mass[:, :-1].sum(1))


def _tile(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    kv_heads, groups, rows, _ = query.shape
    scores, low = _tile_scores(query, key, positions, scale, window, softcap)
    weights = _weights(scores, rows, sinks)
    mixed = torch.bmm(weights.to(value.dtype), value[:, low : low + scores.shape[-1]])
    return mixed.view(kv_heads, groups, rows, -1)


def _tile_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, int]:
    """Masked scores ``[kv_heads, groups * rows, keys]``, at least float32, and the first key's position."""
    kv_heads, groups, rows, head_dim = query.shape
    low = 0 if window is None else max(0, positions[0] - window + 1)
    high = positions[-1] + 1
    folded = (query * scale).reshape(kv_heads, groups * rows, head_dim)
    scores = torch.bmm(folded, key[:, low:high].transpose(1, 2))
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    _mask(scores.view(kv_heads, groups, rows, high - low), positions, low, window)
    return scores, low


def _weights(scores: torch.Tensor, rows: int, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, -1)
    kv_heads, folded, _ = scores.shape
    extra = sinks.to(scores.dtype).view(kv_heads, folded // rows, 1, 1).expand(-1, -1, rows, 1)
    padded = torch.cat((scores, extra.reshape(kv_heads, folded, 1)), -1)
    return torch.softmax(padded, -1)[..., :-1]


def _mask(scores: torch.Tensor, positions: Sequence[int], low: int, window: int | None) -> None:
    """Hide the future (only columns after the first row's position can hold any) and what left the window."""
    first, high = positions[0] + 1, low + scores.shape[-1]
    at = torch.tensor(positions, device=scores.device)[:, None]
    if first < high:
        columns = torch.arange(first, high, device=scores.device)
        scores[..., first - low :].masked_fill_(columns > at, float("-inf"))
    if window is not None and positions[-1] - window >= low:
        columns = torch.arange(low, positions[-1] - window + 1, device=scores.device)
        scores[..., : columns.numel()].masked_fill_(columns <= at - window, float("-inf"))
