"""Every operation of the kernels in plain torch.

Torch computes on CPUs and MPS, and where Triton does not support a case; it is usable in float64. Attention
and its sums go over tiles of near rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ragcachekit_kernels.arguments import AttentionOptions, Groups, Places, Rotation, Rows

TILE_ROWS = 128
"""Rows of a tile at most: bounds the score buffer and the masked triangle of contiguous rows."""

GAP_PRODUCTS = 1 << 19
"""Masked products per matmul above which a tile ends; they take about as long as another tile's calls."""

MAX_MASKS = 1 << 23
"""Elements of the masks of one forward that its layers share."""


class ContextMass(NamedTuple):
    """Attention of a chunk's rows, summed over heads.

    ``inter`` ``[segments - 1]``: sum per segment before the chunk. ``intra`` ``[]``: sum within the chunk.
    ``outward`` ``[rows]``: part of each row's attention that goes before the chunk. All float32.
    """

    inter: Tensor
    intra: Tensor
    outward: Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, offset: int = 0) -> Tensor:
    """Rotary embedding: pairs of the last dimension, ``(a, b) -> (a cos - b sin, b cos + a sin)``.

    ``x`` is ``[..., tokens, head_dim]``, ``cos`` and ``sin`` are ``[tokens, pairs]``; ``-sin`` undoes the
    rotation. A factor in both scales the rotated dimensions. ``interleaved``: pairs are ``(0, 1), (2, 3),
    ...`` (GLM, Cohere) instead of ``(i, i + pairs)`` (Llama). ``offset`` is the first of the ``2 * pairs``
    rotated dimensions; the others pass (partial rotary). Computed in the wider of float32 and the type of
    ``x``, rounded once.

    RoFormer (Su et al. 2021), eq. 34; FusionRAG A.1 for the composition of unit rotations.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = cos.shape[-1]
    c, s = cos.to(wide), sin.to(wide)
    part = x[..., offset : offset + 2 * pairs].to(wide)
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    first, second = a * c - b * s, b * c + a * s
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    if 2 * pairs == x.shape[-1]:
        return turned.to(x.dtype)
    out = x.clone()
    out[..., offset : offset + 2 * pairs] = turned.to(x.dtype)
    return out


def assemble(out: Tensor, tensors: Sequence[Tensor], places: Places, rotation: Rotation | None) -> None:
    """As :func:`ragcachekit_kernels.dispatch.assemble`, piece by piece."""
    for piece, place in zip(tensors, places, strict=True):
        at = slice(place.start, place.start + place.tokens)
        if rotation is None or place.rotated:
            out[:, at] = piece
        else:
            _put_rotated(out[:, at], piece, rotation, at)


def _put_rotated(out: Tensor, x: Tensor, rotation: Rotation, at: slice, *, add: bool = False) -> None:
    """Set ``out`` to ``x`` with the RoPE of positions ``at``, or add it; in place where types allow."""
    cos, sin, (interleaved, offset) = rotation.cos[at], rotation.sin[at], rotation[2:]
    pairs = cos.shape[1]
    if not out.dtype == x.dtype == cos.dtype or 2 * pairs != x.shape[-1]:
        turned = rotate(x, cos, sin, interleaved=interleaved, offset=offset)
        out.copy_(out + turned if add else turned)
        return
    parts = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(pairs), slice(pairs, None))
    (a, b), (to_a, to_b) = ([one[..., part] for part in parts] for one in (x, out))
    for to, first, second, sign in ((to_a, a, b, -1), (to_b, b, a, 1)):
        if add:
            to.addcmul_(first, cos)
        else:
            torch.mul(first, cos, out=to)
        to.addcmul_(second, sin, value=sign)


def move_alike(
    sides: tuple[Tensor, Tensor],
    moves: tuple[Tensor, Tensor],
    alike: Tensor,
    by: int,
    groups: Groups,
    rotations: tuple[Rotation | None, Rotation | None],
) -> None:
    """As :func:`ragcachekit_kernels.dispatch.move_alike`, one group in the cache at a time."""
    both, width = torch.cat(moves, -1), moves[0].shape[-1]
    norms = torch.linalg.vector_norm(sides[by].float(), dim=-1).clamp_min_(1e-12)[:, None]
    for start, stop, first, last in groups:
        at = slice(start, stop)
        weights = torch.bmm(alike[:, first:last], sides[by][:, at].float().mT).div_(norms[..., at]).exp_()
        weights /= weights.sum(-2, keepdim=True)
        more = torch.bmm(weights.mT, both[:, first:last])
        parts = more[..., :width], more[..., width:]
        for side, move, rotation in zip(sides, parts, rotations, strict=True):
            if rotation is None:
                side[:, at] += move
            else:
                _put_rotated(side[:, at], move, rotation, at, add=True)


def tiles(positions: Sequence[int], width: int, window: int | None = None) -> Iterator[tuple[int, int]]:
    """Half-open row ranges of one tile each; ``positions`` must be ascending.

    A tile computes the keys up to its last row for all its rows, those between two rows in vain for the
    rows before. ``width`` is the products per row and key: heads times head_dim.
    """
    start = 0
    for row in range(1, len(positions) + 1):
        if row < len(positions) and row - start < TILE_ROWS:
            step = positions[row] - positions[row - 1]
            within = window is None or step <= window
            if within and (row - start) * (step - 1) * width <= GAP_PRODUCTS:
                continue
        yield start, row
        start = row


def attend(query: Tensor, key: Tensor, value: Tensor, rows: Rows, options: AttentionOptions) -> Tensor:
    """As :func:`ragcachekit_kernels.dispatch.sparse_attention`, one tile of near rows at a time.

    Keys after a tile's last position are never touched, and query heads that share a KV head are rows of one
    head. A soft-cap and sinks are beyond torch's own attention, which keeps scores in the cache.
    """
    grouped = _grouped(query, key)
    shape = grouped.shape[:3]
    out = query.new_empty(*shape, value.shape[-1])
    plain = options.softcap is None and options.sinks is None and key.shape[-1] == value.shape[-1]
    for start, stop in tiles(rows, query.shape[0] * query.shape[2], options.window):
        tile, positions = grouped[:, :, start:stop], rows[start:stop]
        if plain:
            low, high = _seen(positions, options.window)
            mixed = scaled_dot_product_attention(
                tile.reshape(1, shape[0], -1, tile.shape[-1]),
                key[None, :, low:high],
                value[None, :, low:high],
                attn_mask=_tile_mask(rows, start, stop, shape[1], options.window, query),
                scale=options.scale,
            )
        else:
            scores, low = _tile_scores(tile, key, positions, options)
            weights = _weights(scores, stop - start, options.sinks).to(value.dtype)
            mixed = torch.bmm(weights, value[:, low : low + scores.shape[-1]])
        out[:, :, start:stop] = mixed.view(*shape[:2], stop - start, -1)
    return out.flatten(0, 1)


def _tile_mask(rows: Rows, start: int, stop: int, groups: int, window: int | None, query: Tensor) -> Tensor:
    """``[groups * rows, keys]`` of the type of ``query``: 0 where a row of the tile sees a key, else -inf."""
    positions = rows[start:stop]

    def make() -> Tensor:
        low, high = _seen(positions, window)
        mask = torch.zeros(groups, len(positions), high - low, dtype=query.dtype)
        _mask(mask, positions, low, window)
        return mask.flatten(0, 1)

    if groups * len(rows) * (rows[-1] + 1) > MAX_MASKS:
        return make().to(query.device)
    return rows._on(query.device, make, ("mask", start, stop, groups, window, query.dtype))


def column_scores(
    query: Tensor,
    key: Tensor,
    positions: Sequence[int],
    options: AttentionOptions,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """As :func:`ragcachekit_kernels.dispatch.column_scores`, one tile at a time."""
    grouped = _grouped(query, key)
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros(key.shape[1], dtype=wide, device=key.device)
    for start, stop in tiles(positions, query.shape[0] * query.shape[2], options.window):
        scores, low = _tile_scores(grouped[:, :, start:stop], key, positions[start:stop], options)
        scores = scores.to(wide)
        seen = out[low : low + scores.shape[-1]]
        if spans is None:
            seen += _weights(scores, stop - start, options.sinks).sum((0, 1))
        for left, right in spans or ():
            left, right = max(left - low, 0), min(right - low, scores.shape[-1])
            if left < right:
                weights = torch.softmax(scores[..., left:right], -1)
                seen[left:right] += weights.nan_to_num_(0.0).sum((0, 1))
    return out


def context_mass(
    query: Tensor, key: Tensor, positions: Sequence[int], lengths: Sequence[int], options: AttentionOptions
) -> ContextMass:
    """As :func:`ragcachekit_kernels.dispatch.context_mass`, one tile at a time."""
    wide = torch.promote_types(query.dtype, torch.float32)
    key, grouped = key.to(wide), _grouped(query.to(wide), key)
    member = torch.repeat_interleave(torch.eye(len(lengths)), torch.tensor(lengths), 0).to(key)
    mass = key.new_empty(len(positions), len(lengths))
    for start, stop in tiles(positions, query.shape[0] * query.shape[2], options.window):
        scores, low = _tile_scores(grouped[:, :, start:stop], key, positions[start:stop], options)
        weights = _weights(scores, stop - start, options.sinks)
        rows = weights.view(-1, stop - start, weights.shape[-1]).sum(0)
        mass[start:stop] = rows @ member[low : low + rows.shape[1]]
    mass = mass.float()
    return ContextMass(mass[:, :-1].sum(0), mass[:, -1].sum(), mass[:, :-1].sum(1))


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """``[kv_heads, group, rows, head_dim]``."""
    return query.reshape(len(key), query.shape[0] // len(key), *query.shape[1:])


def _seen(positions: Sequence[int], window: int | None) -> tuple[int, int]:
    """Half-open range of the keys that rows at ``positions`` see."""
    return 0 if window is None else max(0, positions[0] - window + 1), positions[-1] + 1


def _tile_scores(
    query: Tensor, key: Tensor, positions: Sequence[int], options: AttentionOptions
) -> tuple[Tensor, int]:
    """Masked scores ``[kv_heads, group * rows, keys]`` and the first key's position.

    They have the type of ``query``, or at least float32 with a soft-cap.
    """
    kv_heads, groups, rows, head_dim = query.shape
    window, softcap = options.window, options.softcap
    low, high = _seen(positions, window)
    folded = (query * options.scale).reshape(kv_heads, groups * rows, head_dim)
    seen = key[:, low:high]
    if seen.itemsize == 2:
        seen = seen.contiguous()  # bmm would copy the transposed keys, which is several times slower
    scores = torch.bmm(folded, seen.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores.to(torch.promote_types(scores.dtype, torch.float32)) / softcap) * softcap
    _mask(scores.view(kv_heads, groups, rows, high - low), positions, low, window)
    return scores, low


def _weights(scores: Tensor, rows: int, sinks: Tensor | None) -> Tensor:
    """Softmax, in float32 or wider inside; 16-bit scores may come back as 16-bit weights."""
    if sinks is None and scores.device.type != "mps":
        return torch.softmax(scores, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # MPS may sum in 16 bits
    if sinks is None:
        return torch.softmax(scores, -1)
    kv_heads, folded, _ = scores.shape
    extra = sinks.to(scores.dtype).view(kv_heads, folded // rows, 1, 1).expand(-1, -1, rows, 1)
    padded = torch.cat((scores, extra.reshape(kv_heads, folded, 1)), -1)
    return torch.softmax(padded, -1)[..., :-1]


def _mask(scores: Tensor, positions: Sequence[int], low: int, window: int | None) -> None:
    """Hide later keys, all in columns after the first row's position, and keys before the window."""
    first, high = positions[0] + 1, low + scores.shape[-1]
    at = torch.tensor(positions, device=scores.device)[:, None]
    if first < high:
        columns = torch.arange(first, high, device=scores.device)
        scores[..., first - low :].masked_fill_(columns > at, float("-inf"))
    if window is not None and positions[-1] - window >= low:
        columns = torch.arange(low, positions[-1] - window + 1, device=scores.device)
        scores[..., : columns.numel()].masked_fill_(columns <= at - window, float("-inf"))


def span_sums(values: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Sums of ``values`` ``[tokens]`` over half-open ranges, ``[spans]`` float64."""
    values = values.cpu() if values.device.type == "mps" else values  # MPS has no float64
    totals = torch.nn.functional.pad(values.double().cumsum(0), (1, 0))
    at = torch.tensor([*spans], dtype=torch.long).reshape(-1, 2).to(values.device)
    return totals[at[:, 1]] - totals[at[:, 0]]


def kv_deviation(new: Tensor, old: Tensor, positions: Sequence[int]) -> Tensor:
    """``[rows]`` float32: squared distance of ``new`` ``[heads, rows, dim]`` from ``old[:, positions]``."""
    at = torch.tensor(positions, dtype=torch.long, device=old.device)
    return (old.index_select(1, at).float() - new.float()).square().sum((0, 2))
