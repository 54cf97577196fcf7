"""Rotation, moves and sums in plain torch, usable in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragcachekit_kernels.placement.planes import ChunkTensors, Layout, Place


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False, offset: int = 0
) -> torch.Tensor:
    """Rotary embedding: pairs of the last dimension, ``(a, b) -> (a cos - b sin, b cos + a sin)``.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., tokens, head_dim]``.
    cos, sin : torch.Tensor
        ``[tokens, pairs]``; ``-sin`` undoes the rotation. A factor in both scales the rotated dimensions.
    interleaved : bool
        Pairs are ``(0, 1), (2, 3), ...`` (GLM, Cohere) instead of ``(i, i + pairs)`` (Llama).
    offset : int
        First of the ``2 * pairs`` rotated dimensions; the others pass (partial rotary).

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
    if 2 * pairs == x.shape[-1]:
        return turned.to(x.dtype)
    out = x.clone()
    out[..., offset : offset + 2 * pairs] = turned.to(x.dtype)
    return out


def assemble(layout: Layout, first: int = 0, last: int | None = None) -> None:
    """Copy chunks' tensors into planes ``first .. last - 1`` of a request's KV, rotated to their positions.

    Quantised tensors are multiplied by their scales; rotated values are rounded once, at the end (EPIC
    section 4.1, FusionRAG A.1).
    """
    skip = torch.tensor(layout.skip, dtype=torch.long)
    for index in range(len(layout.planes))[first:last]:
        plane = layout.planes[index]
        for place, chunk in zip(layout.places, layout.chunks, strict=True):
            turn = layout.turn(plane, place)
            if chunk is None and turn is None:
                continue
            into = plane.kv[:, place.start : place.start + place.tokens]
            new = into if chunk is None else _plain(chunk, index, place)
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
    """Inverse of :func:`assemble`: copy pieces of a request's KV into the chunks' tensors.

    ``tables`` hold the inverse rotation (cos / m and -sin / m). Tensors with scales are rounded to eight
    bits. A scale is the largest magnitude among its elements, divided by 127 (int8) or 448 (fp8 e4m3).
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


def _plain(chunk: ChunkTensors, plane: int, place: Place) -> torch.Tensor:
    """``[heads, tokens, dim]``, float32 if quantised."""
    rows = slice(place.first, place.first + place.tokens)
    elements, scale = chunk.tensors[plane][:, rows], chunk.scale(plane)
    if scale is None:
        return elements
    return elements.float() * (scale if scale.shape[1] == 1 else scale[:, rows])


def _keep(bare: torch.Tensor, into: torch.Tensor, scale: torch.Tensor | None) -> None:
    if scale is None:
        into.copy_(bare)
        return
    largest = 127.0 if into.dtype == torch.int8 else torch.finfo(into.dtype).max
    wide = bare.float()
    per_channel = scale.shape[1] == 1 and scale.shape[2] == bare.shape[2]
    top = wide.abs().amax(1 if per_channel else 2, keepdim=True)
    new = top / torch.full_like(top, largest)  # by a number: a GPU would multiply by its reciprocal
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
    """Rows ``[kv_heads, rows, dim]`` written in place at ``positions`` of ``[kv_heads, tokens, dim]``."""
    at = torch.tensor(positions, dtype=torch.long, device=into_key.device)
    into_key.index_copy_(1, at, key)
    into_value.index_copy_(1, at, value)


def span_sums(values: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Sums of ``values`` ``[tokens]`` over half-open ranges, ``[spans]`` float64."""
    values = values.cpu() if values.device.type == "mps" else values  # MPS has no float64
    sums = [values[start:stop].double().sum() for start, stop in spans]
    return torch.stack(sums) if sums else values.new_zeros(0, dtype=torch.float64)


def kv_deviation(new: torch.Tensor, old: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """``[rows]`` float32: squared distance of ``new`` ``[heads, rows, dim]`` from ``old[:, positions]``."""
    at = torch.tensor(positions, dtype=torch.long, device=old.device)
    return (old.index_select(1, at).float() - new.float()).square().sum((0, 2))
