"""Plain-torch references: short, obviously right, usable in float64. Every kernel is tested against them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    offset: int = 0,
) -> torch.Tensor:
    """Rotate pairs of the last dimension: ``(a, b) -> (a cos - b sin, b cos + a sin)``.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., tokens, head_dim]``.
    cos, sin : torch.Tensor
        ``[tokens, pairs]``; ``-sin`` undoes the rotation. A factor m multiplied into both scales
        the rotated dimensions by m.
    interleaved : bool
        Pairs are neighbours ``(0, 1), (2, 3), ...`` (GLM, Cohere) instead of ``(i, i + pairs)``
        (half-split, Llama).
    offset : int
        First rotated dimension; the ``2 * pairs`` dimensions from there on rotate, the others pass
        (partial rotary).

    Returns
    -------
    torch.Tensor
        Like ``x``; computed in the wider of float32 and the type of ``x``, rounded once.

    Notes
    -----
    RoFormer (Su et al. 2021), eq. 34; FusionRAG A.1 for the composition of unit rotations.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = cos.shape[-1]
    c, s = cos.to(wide), sin.to(wide)
    part = x[..., offset : offset + 2 * pairs].to(wide)
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    first, second = a * c - b * s, b * c + a * s
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    out = x.clone()
    out[..., offset : offset + 2 * pairs] = turned.to(x.dtype)
    return out


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of rows at arbitrary positions: row i sees exactly keys ``0..positions[i]``.

    Parameters
    ----------
    query : torch.Tensor
        ``[heads, rows, head_dim]``.
    key, value : torch.Tensor
        ``[kv_heads, tokens, head_dim]``, key j at position j; heads is a multiple of kv_heads.
    positions : torch.Tensor
        ``[rows]`` integers.
    scale : float
        Factor on the scores before the softmax.
    window : int, optional
        Sliding window: keys at ``positions[i] - window`` and before are not seen.
    softcap : float, optional
        ``softcap * tanh(scores / softcap)`` (Gemma 2).
    sinks : torch.Tensor, optional
        ``[heads]`` logits that take part in the softmax and carry no value (gpt-oss).

    Returns
    -------
    torch.Tensor
        ``[heads, rows, value_head_dim]``.

    Notes
    -----
    EPIC section 4.2 prints a multiplicative mask; the mask here is additive, as softmax needs.
    """
    values = value.repeat_interleave(query.shape[0] // key.shape[0], 0)
    scores = _scores(query, key, positions, scale, window, softcap)
    if sinks is not None:
        extra = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, extra), -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, -1, dtype=wide)[..., : key.shape[1]]
    return weights.to(value.dtype) @ values


def column_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    spans: Sequence[tuple[int, int]] | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """How much attention each key gets from the given rows, summed over heads and rows.

    Parameters
    ----------
    query, key, positions, scale, window, softcap, sinks
        As for :func:`sparse_attention`.
    spans : sequence of (int, int), optional
        Half-open key ranges that do not overlap: the softmax of a row goes over each of them by
        itself (sinks have no part in it), and keys outside of all get 0. None: one softmax over
        all keys that the row sees.

    Returns
    -------
    torch.Tensor
        ``[tokens]``, float32 or wider.

    Notes
    -----
    With spans: FusionRAG section 3.2; without: Cache-Craft section 3.1 (its inter and intra sums).
    """
    scores = _scores(query, key, positions, scale, window, softcap)
    wide = torch.promote_types(scores.dtype, torch.float32)
    if spans is None:
        if sinks is not None:
            extra = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, extra), -1)
        return torch.softmax(scores, -1, dtype=wide)[..., : key.shape[1]].sum((0, 1))
    out = torch.zeros(key.shape[1], dtype=wide, device=key.device)
    for start, stop in spans:
        weights = torch.softmax(scores[..., start:stop], -1, dtype=wide)
        out[start:stop] = weights.nan_to_num(0.0).sum((0, 1))  # a row that sees nothing of the span
    return out


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """``[heads, rows, tokens]``, minus infinity where a row does not see a key."""
    keys = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    columns = torch.arange(key.shape[1], device=key.device)
    rows = positions.to(key.device)[:, None]
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    return scores.masked_fill(~seen, float("-inf"))
