"""Public functions and types of the kernels: callers import from here and nowhere else.

Every function chooses between Triton and torch by the device, the types and what Triton could compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ragcachekit_kernels import in_torch
from ragcachekit_kernels.arguments import AttentionOptions as AttentionOptions
from ragcachekit_kernels.arguments import Place as Place
from ragcachekit_kernels.arguments import Places as Places
from ragcachekit_kernels.arguments import Rotation as Rotation
from ragcachekit_kernels.arguments import Rows as Rows
from ragcachekit_kernels.arguments import Spans as Spans
from ragcachekit_kernels.arguments import checked_rows, spans_within
from ragcachekit_kernels.backend import DTYPES, attempt, case_of, choice
from ragcachekit_kernels.backend import uses_triton as uses_triton
from ragcachekit_kernels.in_torch import ContextMass as ContextMass
from ragcachekit_kernels.in_torch import rotate as rotate

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
"""Types of quantised KV, which have scales."""


def assemble(
    out: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    places: Places,
    rotation: Rotation | None = None,
    scales: Sequence[torch.Tensor | None] = (),
) -> None:
    """Write pieces of chunk KV to their places in the keys or the values of one layer.

    Parameters
    ----------
    out : torch.Tensor
        ``[heads, slots, dim]``, one slot per position, the last dimension contiguous.
    tensors : sequence of torch.Tensor
        Per place ``[heads, tokens, dim]``, on the device of ``out``.
    places : Places
        Made once for a prompt, so that all layers share one copy on the device.
    rotation : Rotation, optional
        Rotates pieces whose place is not ``rotated``, in float32; the result is rounded once.
    scales : sequence of (torch.Tensor or None)
        Empty, or per tensor the factor of its elements, float32: one per channel ``[heads, 1, dim]`` or per
        token ``[heads, tokens, 1]``; None for tensors that are not quantised.

    Raises
    ------
    ValueError
        If shapes do not fit together, or places lie outside of the slots.

    Notes
    -----
    EPIC section 4.1, FusionRAG A.1.
    """
    _check_assembly(out, tensors, places, rotation, scales)
    in_plain_torch = partial(in_torch.assemble, out, tensors, places, rotation, scales)
    plain = {tensor.dtype for n, tensor in enumerate(tensors) if not scales or scales[n] is None}
    quantised = {tensor.dtype for tensor in tensors} - plain
    fits = {out.dtype, *plain} <= set(DTYPES) and quantised <= set(EIGHT_BITS)
    if not tensors or not fits or not uses_triton(out.device):
        in_plain_torch()
        return
    from ragcachekit_kernels import assembly

    kernel = partial(assembly.assemble, out, tensors, places, rotation, scales)
    attempt(case_of("assembly", out, *tensors), kernel, in_plain_torch)


def _check_assembly(
    out: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    places: Places,
    rotation: Rotation | None,
    scales: Sequence[torch.Tensor | None],
) -> None:
    heads, slots, dim = out.shape
    if out.stride(2) != 1 or slots < places.stop:
        raise ValueError(f"places end at {places.stop}; {tuple(out.shape)} does not hold that row by row")
    if len(tensors) != len(places) or len(scales) not in (0, len(places)):
        raise ValueError(f"{len(places)} places need as many tensors, and as many scales or none")
    for number, (tensor, place) in enumerate(zip(tensors, places, strict=True)):
        if tensor.shape != (heads, place.tokens, dim):
            raise ValueError(f"a piece {tuple(tensor.shape)} does not fit {heads} heads, {place} and {dim}")
        scale = scales[number] if scales else None
        if scale is not None and scale.shape not in ((heads, 1, dim), (heads, place.tokens, 1)):
            raise ValueError(f"scales of shape {tuple(scale.shape)} for a piece {tuple(tensor.shape)}")
    if rotation is not None:
        positions, pairs = rotation.cos.shape
        if rotation.sin.shape != rotation.cos.shape or positions < places.stop:
            raise ValueError(f"cos and sin must be of equal shape, with {places.stop} rows or more")
        if rotation.offset + 2 * pairs > dim:
            raise ValueError(f"{pairs} pairs from {rotation.offset} on do not fit into {dim}")


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

    Parameters
    ----------
    query : torch.Tensor
        ``[heads, rows, head_dim]``.
    key, value : torch.Tensor
        ``[kv_heads, tokens, head_dim]``, key j at position j; heads is a multiple of kv_heads.
    positions : sequence of int
        :class:`Rows` are checked and put on the device once, however many calls use them.
    options : AttentionOptions

    Returns
    -------
    torch.Tensor
        ``[heads, rows, value_head_dim]``, on a GPU a view of ``[rows, heads, value_head_dim]``.

    Raises
    ------
    ValueError
        For positions that do not ascend or lie outside the keys.

    Notes
    -----
    All keys and values up to a row's position must be finite, those that a neighbouring row sees too: a
    weight of zero times NaN is NaN. EPIC section 4.2 prints a multiplicative mask; this one is additive.
    """
    rows = checked_rows(query, key, positions)
    in_plain_torch = partial(in_torch.attend, query, key, value, rows.positions, options)
    if not rows or attention_choice(query, key, value) != "triton":
        return in_plain_torch()
    from ragcachekit_kernels.attention import attention

    kernel = partial(attention, query, key, value, rows.on(key.device), options)
    return attempt(case_of("attention", key, value), kernel, in_plain_torch)


def column_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: Sequence[int],
    options: AttentionOptions,
    spans: Sequence[tuple[int, int]] | None = None,
) -> torch.Tensor:
    """Attention that each key gets from rows at ascending ``positions``, summed over heads and rows.

    Parameters
    ----------
    query, key, positions, options
        As for :func:`ragcachekit_kernels.dispatch.sparse_attention`.
    spans : sequence of (int, int), optional
        Half-open key ranges that do not overlap. Each gets a softmax of its own, without sinks; keys
        outside of all get 0. None: one softmax over all keys that the row sees. :class:`Spans` are put on
        the device once, however many calls use them.

    Returns
    -------
    torch.Tensor
        ``[tokens]``, float32 or wider.

    Raises
    ------
    ValueError
        As for :func:`ragcachekit_kernels.dispatch.sparse_attention`, or if a span does not lie within the
        keys.

    Notes
    -----
    With spans: FusionRAG section 3.2; without: Cache-Craft section 3.1 (its inter and intra sums).
    """
    rows = checked_rows(query, key, positions)
    ranges = None if spans is None else spans_within(spans, key.shape[1])
    in_plain_torch = partial(in_torch.column_scores, query, key, rows.positions, options, ranges)
    if not rows or choice("scores", query, key) != "triton":
        return in_plain_torch()
    from ragcachekit_kernels import scores

    kernel = partial(scores.column_scores, query, key, rows.on(key.device), options, ranges)
    return attempt(case_of("scores", key), kernel, in_plain_torch)


def context_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: Sequence[int],
    lengths: Sequence[int],
    options: AttentionOptions,
) -> ContextMass:
    """Attention of a chunk's rows: per key, per segment, and per row the part before the chunk.

    The inter and intra sums of Cache-Craft section 3.1. ``lengths`` are the tokens of the segments that the
    keys consist of, the chunk's own last; all else, and errors, as for :func:`column_scores`.
    """
    rows = checked_rows(query, key, positions)
    if sum(lengths) != key.shape[1] or not lengths:
        raise ValueError(f"segments of {list(lengths)} tokens do not make up {key.shape[1]} keys")
    in_plain_torch = partial(in_torch.context_mass, query, key, rows.positions, lengths, options)
    if not rows or choice("scores", query, key) != "triton":
        return in_plain_torch()
    from ragcachekit_kernels import scores

    kernel = partial(scores.context_mass, query, key, rows.on(key.device), lengths, options)
    return attempt(case_of("scores", key), kernel, in_plain_torch)


def span_sums(values: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Sums of ``values`` ``[tokens]`` over half-open ranges, ``[spans]`` float64.

    ValueError if a span does not lie within the values.
    """
    return in_torch.span_sums(values, spans_within(spans, values.shape[0]))


def kv_deviation(new: torch.Tensor, old: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Squared distance of new keys or values from the old ones at ascending ``positions`` (CacheBlend).

    ``new`` is ``[kv_heads, rows, dim]``, ``old`` ``[kv_heads, tokens, dim]``. Returns ``[rows]`` float32,
    summed over heads and dimensions. ValueError for positions that do not ascend or lie outside the tokens,
    and for shapes that do not fit.
    """
    rows = checked_rows(new, old, positions)
    if (new.shape[0], new.shape[2]) != (old.shape[0], old.shape[2]):
        raise ValueError(f"rows {tuple(new.shape)} and {tuple(old.shape)} differ in heads or dimensions")
    in_plain_torch = partial(in_torch.kv_deviation, new, old, rows.positions)
    if not rows or not uses_triton(new.device):
        return in_plain_torch()
    from ragcachekit_kernels import scores

    kernel = partial(scores.kv_deviation, new, old, rows.on(new.device))
    return attempt(case_of("deviation", new), kernel, in_plain_torch)
