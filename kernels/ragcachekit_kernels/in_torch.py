"""Arguments of the kernels, and every operation in plain torch.

Torch computes on CPUs and MPS, and where Triton does not support a case; it is usable in float64. Attention
and its sums go over tiles of near rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Scale, mask and logits of one attention layer.

    - ``scale``: Factor on the products of queries and keys, before the soft-cap and the softmax.
    - ``window``: Sliding window in tokens: a row at position p sees keys ``p - window + 1 .. p``.
    - ``softcap``: Bound on the scaled scores, ``softcap * tanh(scores / softcap)`` (Gemma 2).
    - ``sinks``: ``[heads]`` natural logits that take part in the softmax and carry no value (gpt-oss).

    ValueError if the scale, window or soft-cap is not positive.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        limits = (self.scale, self.window, self.softcap)
        if any(limit is not None and limit <= 0 for limit in limits):
            raise ValueError(
                f"scale {self.scale}, window {self.window} and softcap {self.softcap} must be positive"
            )

    @property
    def is_plain(self) -> bool:
        """True without a window and a soft-cap: such kernels need fewer registers."""
        return self.window is None and self.softcap is None


@dataclass(frozen=True, eq=False)
class _OnDevices(Sequence[Item]):
    """Checked items whose tensors are copied to a device at most once."""

    items: tuple[Item, ...]
    _copies: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for items that cannot be."""

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.items[index]

    def _on(self, device: torch.device, make: Callable[[], Tensor], name: object) -> Tensor:
        copy = self._copies.get((device, name))
        if copy is None:
            host = make()
            if device.type == "cuda":
                host = host.pin_memory()
            copy = self._copies[device, name] = host.to(device, non_blocking=True)
        return copy


class Rows(_OnDevices[int]):
    """Ascending positions of one forward's rows; ValueError if they do not ascend or are negative."""

    def __post_init__(self) -> None:
        if self.items and (self.items[0] < 0 or any(a >= b for a, b in pairwise(self.items))):
            raise ValueError("positions must be ascending and not negative")

    def on(self, device: torch.device) -> Tensor:
        """``[rows]`` int32 on ``device``, as kernels read them."""
        return self._on(device, lambda: torch.tensor(self.items, dtype=torch.int32), "rows")

    def as_index(self, device: torch.device) -> Tensor:
        """``[rows]`` int64 on ``device``, as torch indexes with."""
        return self._on(device, lambda: torch.tensor(self.items, dtype=torch.int64), "index")


def checked_rows(query: Tensor, key: Tensor, positions: Sequence[int]) -> Rows:
    """Rows at ``positions``; ValueError unless they ascend and fit the query and the keys."""
    if len(positions) != query.shape[1]:
        raise ValueError(f"{query.shape[1]} query rows but {len(positions)} positions")
    if query.shape[0] % key.shape[0]:
        raise ValueError(f"{query.shape[0]} query heads cannot share {key.shape[0]} KV heads")
    rows, tokens = positions if isinstance(positions, Rows) else Rows(tuple(positions)), key.shape[1]
    if rows and rows[-1] >= tokens:
        raise ValueError(f"positions must be ascending within 0..{tokens - 1}: {rows[-1]} lies outside")
    return rows


class Spans(_OnDevices[tuple[int, int]]):
    """Half-open key ranges; ValueError if one of them starts below 0 or ends before it starts."""

    def __post_init__(self) -> None:
        for start, stop in self.items:
            if not 0 <= start <= stop:
                raise ValueError(f"the span {start}..{stop} does not go forward from 0 or later")

    def on(self, device: torch.device) -> Tensor:
        """``[spans, 2]`` int32 on ``device``."""
        return self._on(device, lambda: torch.tensor(self.items, dtype=torch.int32).reshape(-1, 2), "spans")


def spans_within(spans: Sequence[tuple[int, int]], tokens: int) -> Spans:
    """Spans; ValueError unless each goes forward within ``0..tokens``."""
    checked = spans if isinstance(spans, Spans) else Spans(tuple(spans))
    for start, stop in checked:
        if stop > tokens:
            raise ValueError(f"the span {start}..{stop} does not lie within {tokens} keys")
    return checked


class Place(NamedTuple):
    """Positions ``start .. start + tokens - 1`` of a prompt, where a piece of chunk KV belongs.

    ``rotated``: its keys have RoPE for these positions already (an exact prefix) and are copied.
    """

    start: int
    tokens: int
    rotated: bool = False


class Places(_OnDevices[Place]):
    """Places of the pieces of one prompt, the same for keys and values of all layers.

    ValueError unless they ascend without overlap, from position 0 or later, with at least one token each.
    """

    def __post_init__(self) -> None:
        if any(a.start + a.tokens > b.start for a, b in pairwise(self.items)):
            raise ValueError("places must be ascending and must not overlap")
        if self.items and (self.items[0].start < 0 or any(place.tokens < 1 for place in self.items)):
            raise ValueError("a place starts at 0 or later and has at least one token")

    @property
    def stop(self) -> int:
        """Position after the last place."""
        return self.items[-1].start + self.items[-1].tokens if self.items else 0

    def rows(self, device: torch.device, chosen: tuple[int, ...]) -> Tensor:
        """``[3, rows]`` int32 for the rows of the chosen places, one after the other.

        Their positions, the positions to rotate them to (-1: none), and the numbers of their pieces among the
        chosen ones.
        """

        def make() -> Tensor:
            parts = []
            for number, piece in enumerate(chosen):
                start, tokens, rotated = self.items[piece]
                at = torch.arange(start, start + tokens, dtype=torch.int32)
                turn = torch.full_like(at, -1) if rotated else at
                parts.append(torch.stack((at, turn, torch.full_like(at, number))))
            return torch.cat(parts, 1)

        return self._on(device, make, chosen)


class Rotation(NamedTuple):
    """Rotary embedding of one layer: cosines and sines ``[positions, pairs]``, float32, from position 0 on.

    ``interleaved`` and ``offset`` as for :func:`ragcachekit_kernels.dispatch.rotate`. An attention factor is
    part of both tables.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    offset: int = 0


class Group(NamedTuple):
    """Positions ``start .. stop - 1`` of a chunk; rows ``first .. last - 1`` are those computed in it."""

    start: int
    stop: int
    first: int
    last: int


class Groups(_OnDevices[Group]):
    """Chunks whose rows are moved; ValueError unless they ascend and each has tokens and recomputed rows."""

    def __post_init__(self) -> None:
        ascends = all(a.stop <= b.start and a.last <= b.first for a, b in pairwise(self.items))
        if not ascends or any(g.start >= g.stop or g.first >= g.last for g in self.items):
            raise ValueError("groups must ascend without overlap, each with tokens and recomputed rows")

    def blocks(self, device: torch.device, tokens: int) -> Tensor:
        """``[4, blocks]`` int32 on ``device``: the groups in blocks of at most ``tokens`` positions."""

        def make() -> Tensor:
            parts = (
                (start, group.stop, group.first, group.last)
                for group in self.items
                for start in range(group.start, group.stop, tokens)
            )
            return torch.tensor([*parts], dtype=torch.int32).T.contiguous()

        return self._on(device, make, tokens)


# -- operations ----------------------------------------------------------------------------------------

TILE_ROWS = 128
"""Rows of a tile at most: bounds the score buffer and the masked triangle of contiguous rows."""

GAP_PRODUCTS = 1 << 19
"""Masked products per matmul above which a tile ends; they take about as long as another tile's calls."""

MAX_MASKS = 1 << 23
"""Elements of the masks of one forward that its layers share."""


class ContextMass(NamedTuple):
    """Attention of a chunk's rows, summed over heads.

    ``columns`` ``[tokens]``: sum over all rows per key. ``inter`` ``[segments - 1]``: sum per segment before
    the chunk. ``intra`` ``[]``: sum within the chunk. ``outward`` ``[rows]``: part of each row's attention
    that goes before the chunk. All float32.
    """

    columns: Tensor
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


def assemble(
    out: Tensor,
    tensors: Sequence[Tensor],
    places: Places,
    rotation: Rotation | None,
    scales: Sequence[Tensor | None],
) -> None:
    """As :func:`ragcachekit_kernels.dispatch.assemble`, piece by piece."""
    for number, (tensor, place) in enumerate(zip(tensors, places, strict=True)):
        at = slice(place.start, place.start + place.tokens)
        scale = scales[number] if scales else None
        piece = tensor if scale is None else tensor.float() * scale
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
    columns, mass = key.new_zeros(key.shape[1]), key.new_empty(len(positions), len(lengths))
    for start, stop in tiles(positions, query.shape[0] * query.shape[2], options.window):
        scores, low = _tile_scores(grouped[:, :, start:stop], key, positions[start:stop], options)
        weights = _weights(scores, stop - start, options.sinks)
        rows = weights.view(-1, stop - start, weights.shape[-1]).sum(0)
        columns[low : low + rows.shape[1]] += rows.sum(0)
        mass[start:stop] = rows @ member[low : low + rows.shape[1]]
    mass = mass.float()
    return ContextMass(columns.float(), mass[:, :-1].sum(0), mass[:, -1].sum(), mass[:, :-1].sum(1))


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
