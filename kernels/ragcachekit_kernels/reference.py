"""Plain-torch references: short, obviously right, usable in float64. Every kernel is tested against them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragcachekit_kernels.planes import ChunkTensors, Layout


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


def assemble(layout: Layout, first: int = 0, last: int | None = None) -> None:
    """Put chunks' tensors into a request's KV, rotated to their new positions.

    Parameters
    ----------
    layout : Layout
        Rounded tensors are multiplied by their scales; what is rotated is rounded once, at the end.
    first, last : int
        Planes to do.

    Notes
    -----
    EPIC section 4.1, FusionRAG A.1.
    """
    skip = torch.tensor(layout.skip, dtype=torch.long)
    for index in range(len(layout.planes))[first:last]:
        plane = layout.planes[index]
        for place, chunk in zip(layout.places, layout.chunks, strict=True):
            turn = layout.turn(plane, place)
            if chunk is None and turn is None:
                continue
            into = plane.kv[:, place.start : place.start + place.tokens]
            new = into if chunk is None else _plain(chunk, index, place.tokens)
            new = new.to(torch.promote_types(new.dtype, into.dtype))
            if turn is not None:
                new = rotate(new, *turn, interleaved=plane.interleaved, offset=plane.offset)
            left = skip[(skip >= place.start) & (skip < place.start + place.tokens)] - place.start
            kept = torch.ones(place.tokens, dtype=torch.bool).index_fill_(0, left, False)
            if left.numel():
                into[:, kept] = new[:, kept].to(into.dtype)
            else:
                into.copy_(new)


def disassemble(layout: Layout) -> None:
    """The inverse of :func:`assemble`: take the pieces of a request's KV out into the chunks' tensors.

    ``tables`` hold the inverse rotation (cos / m and -sin / m). Tensors with scales are rounded to eight
    bits, and their scales are written: the largest magnitude of what shares a scale, divided by 127 (int8)
    or 448 (fp8 e4m3).
    """
    for index, plane in enumerate(layout.planes):
        for place, chunk in zip(layout.places, layout.chunks, strict=True):
            if chunk is None:
                continue
            bare = plane.kv[:, place.start : place.start + place.tokens]
            turn = layout.turn(plane, place)
            if turn is not None:
                bare = rotate(bare, *turn, interleaved=plane.interleaved, offset=plane.offset)
            _keep(bare, chunk.tensors[index][:, : place.tokens], chunk.scale(index))


def _plain(chunk: ChunkTensors, plane: int, tokens: int) -> torch.Tensor:
    """``[heads, tokens, dim]``, float32 where it was rounded."""
    elements, scale = chunk.tensors[plane][:, :tokens], chunk.scale(plane)
    return elements if scale is None else elements.float() * scale[:, :tokens]


def _keep(bare: torch.Tensor, into: torch.Tensor, scale: torch.Tensor | None) -> None:
    if scale is None:
        into.copy_(bare)
        return
    largest = 127.0 if into.dtype == torch.int8 else torch.finfo(into.dtype).max
    wide = bare.float()
    per_channel = scale.shape[1] == 1 and scale.shape[2] == bare.shape[2]
    top = wide.abs().amax(1 if per_channel else 2, keepdim=True)
    new = top / torch.full_like(top, largest)  # a number's reciprocal would be multiplied with on a GPU
    scaled = (wide / new.clamp_min(torch.finfo(torch.float32).tiny)).clamp(-largest, largest)
    into.copy_(scaled.round() if into.dtype == torch.int8 else scaled)
    scale[:, : new.shape[1]] = new


def scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    into_key: torch.Tensor,
    into_value: torch.Tensor,
    positions: Sequence[int],
) -> None:
    """Write rows ``[kv_heads, rows, dim]`` at ``positions`` of ``[kv_heads, tokens, dim]``, in place."""
    at = torch.tensor(positions, dtype=torch.long, device=into_key.device)
    into_key.index_copy_(1, at, key)
    into_value.index_copy_(1, at, value)


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


def sparse_attention_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`sparse_attention` and ``[heads, rows]`` log-sum-exps of its scores.

    They are natural logarithms, sinks included, float32 or wider: ``exp(score - lse)`` is a softmax weight.
    """
    out = sparse_attention(
        query, key, value, positions, scale=scale, window=window, softcap=softcap, sinks=sinks
    )
    scores = _scores(query, key, positions, scale, window, softcap)
    lse = torch.logsumexp(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)
    return out, lse if sinks is None else torch.logaddexp(lse, sinks.to(lse)[:, None])


def column_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    spans: Sequence[tuple[int, int]] | None = None,
    *,
    lse: torch.Tensor | None = None,
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
    lse : torch.Tensor, optional
        ``[heads, rows]``, without spans: the natural log-sum-exp of each row's scores, sinks included,
        where it is known (attention computes it). Two computations of float32 scores differ by their
        rounding: a row's weights add up to 1 but for a factor within ``exp(+-(head_dim + 4) 2^-23 m)``, m
        being ``scale`` times the largest sum of ``|q_i k_i|``. Of scores of 1e4 that is a few per cent.

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
    if lse is not None:
        return torch.exp(scores.to(wide) - lse.to(wide)[:, :, None]).sum((0, 1))
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


def span_sums(values: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Sums of ``values`` ``[tokens]`` over half-open ranges, ``[spans]`` float64."""
    sums = [values[start:stop].double().sum() for start, stop in spans]
    return torch.stack(sums) if sums else values.new_zeros(0, dtype=torch.float64)


def kv_deviation(new: torch.Tensor, old: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """``[rows]`` float32: squared distance of ``new`` ``[heads, rows, dim]`` from ``old[:, positions]``."""
    at = torch.tensor(positions, dtype=torch.long, device=old.device)
    return (old.index_select(1, at).float() - new.float()).square().sum((0, 2))


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
