"""Column scores, context mass and deviation: choice of the implementation.

Import from :mod:`ragcachekit_kernels.dispatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ragcachekit_kernels import reference
from ragcachekit_kernels.attention import tiled
from ragcachekit_kernels.attention.tiled import ContextMass
from ragcachekit_kernels.backend import attempt, case_of, choice, uses_triton
from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import checked_rows, spans_within


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
    in_torch = partial(tiled.column_scores, query, key, rows.positions, options, ranges)
    if not rows or choice("scores", query, key) != "triton":
        return in_torch()
    from ragcachekit_kernels.scores import column_scores as kernels

    kernel = partial(kernels.column_scores, query, key, rows.on(key.device), options, ranges)
    return attempt(case_of("scores", key), kernel, in_torch)


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
    in_torch = partial(tiled.context_mass, query, key, rows.positions, lengths, options)
    if not rows or choice("scores", query, key) != "triton":
        return in_torch()
    from ragcachekit_kernels.scores import column_scores as kernels

    kernel = partial(kernels.context_mass, query, key, rows.on(key.device), lengths, options)
    return attempt(case_of("scores", key), kernel, in_torch)


def span_sums(values: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Sums of ``values`` ``[tokens]`` over half-open ranges, ``[spans]`` float64.

    Raises
    ------
    ValueError
        If a span does not lie within the values.
    """
    ranges = spans_within(spans, values.shape[0])
    in_torch = partial(reference.span_sums, values, ranges)
    if not uses_triton(values.device):
        return in_torch()
    from ragcachekit_kernels.scores import deviation

    return attempt(case_of("sums", values), partial(deviation.span_sums, values, ranges), in_torch)


def kv_deviation(new: torch.Tensor, old: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Squared distance of new keys or values from the old ones at ascending ``positions`` (CacheBlend).

    ``new`` is ``[kv_heads, rows, dim]``, ``old`` ``[kv_heads, tokens, dim]``. Returns ``[rows]`` float32,
    summed over heads and dimensions. ValueError for positions that do not ascend or lie outside the tokens,
    and for shapes that do not fit.
    """
    rows = checked_rows(new, old, positions)
    if (new.shape[0], new.shape[2]) != (old.shape[0], old.shape[2]):
        raise ValueError(f"rows {tuple(new.shape)} and {tuple(old.shape)} differ in heads or dimensions")
    in_torch = partial(reference.kv_deviation, new, old, rows.positions)
    if not rows or not uses_triton(new.device):
        return in_torch()
    from ragcachekit_kernels.scores import deviation

    kernel = partial(deviation.kv_deviation, new, old, rows.on(new.device))
    return attempt(case_of("deviation", new), kernel, in_torch)
