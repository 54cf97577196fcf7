"""Column scores, context mass and deviation: choice of the implementation.

Import from :mod:`ragcachekit_kernels.dispatch`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import torch

from ragcachekit_kernels import reference
from ragcachekit_kernels.attention import tiled
from ragcachekit_kernels.backend import uses_triton
from ragcachekit_kernels.fallback import attempt, choice
from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import checked_rows
from ragcachekit_kernels.scores.context import ContextMass
from ragcachekit_kernels.spans import Spans


def scoring_choice(query: torch.Tensor, key: torch.Tensor) -> str:
    """Implementation for these tensors: ``triton``, ``torch``, or ``torch: `` and why not Triton."""
    return choice(_case("scores", key), query, key)


def column_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: Sequence[int],
    options: AttentionOptions,
    spans: Sequence[tuple[int, int]] | None = None,
    *,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that each key gets from rows at ascending ``positions``, summed over heads and rows.

    Shapes, arguments and errors as in :func:`ragcachekit_kernels.reference.column_scores` and
    :func:`ragcachekit_kernels.dispatch.sparse_attention`. :class:`Rows` and :class:`Spans` are put on the
    device once, however many calls use them.
    """
    rows = checked_rows(query, key, positions)
    _check_spans(key.shape[1], spans)
    if lse is not None and spans is not None:
        raise ValueError(
            "a log-sum-exp over all keys says nothing of the softmax over spans: give one of them"
        )
    if lse is not None and lse.shape != query.shape[:2]:
        raise ValueError(f"lse must be [heads, rows] = {tuple(query.shape[:2])}, got {tuple(lse.shape)}")
    in_torch = partial(tiled.column_scores, query, key, rows.positions, options, spans, lse=lse)
    if not rows or scoring_choice(query, key) != "triton":
        return in_torch()
    from ragcachekit_kernels.scores import column_scores as kernels

    ranges = spans if spans is None or isinstance(spans, Spans) else Spans(tuple(spans))
    kernel = partial(kernels.column_scores, query, key, rows.on(key.device), options, ranges, lse=lse)
    return attempt(_case("scores", key), kernel, in_torch)


def context_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: Sequence[int],
    lengths: Sequence[int],
    options: AttentionOptions,
) -> ContextMass:
    """Attention of a chunk's rows: per key, per segment, and per row the part before the chunk.

    Parameters
    ----------
    query, key, positions, options
        As for :func:`column_scores`.
    lengths : sequence of int
        Tokens of the segments that the keys consist of, the chunk's own last.

    Raises
    ------
    ValueError
        Also if the lengths do not add up to the number of keys.

    Notes
    -----
    Cache-Craft section 3.1 (inter and intra sums).
    """
    rows = checked_rows(query, key, positions)
    if sum(lengths) != key.shape[1] or not lengths:
        raise ValueError(f"segments of {list(lengths)} tokens do not make up {key.shape[1]} keys")
    in_torch = partial(tiled.context_mass, query, key, rows.positions, lengths, options)
    if not rows or scoring_choice(query, key) != "triton":
        return in_torch()
    from ragcachekit_kernels.scores import context_kernels

    kernel = partial(context_kernels.context_mass, query, key, rows.on(key.device), lengths, options)
    return attempt(_case("scores", key), kernel, in_torch)


def span_sums(values: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Sums of ``values`` ``[tokens]`` over half-open ranges, ``[spans]`` float64.

    Raises
    ------
    ValueError
        If a span does not lie within the values.
    """
    _check_spans(values.shape[0], spans)
    in_torch = partial(reference.span_sums, values, spans)
    if not uses_triton(values.device):
        return in_torch()
    from ragcachekit_kernels.scores import deviation

    ranges = spans if isinstance(spans, Spans) else Spans(tuple(spans))
    case = "sums", str(values.device), str(values.dtype)
    return attempt(case, partial(deviation.span_sums, values, ranges), in_torch)


def kv_deviation(new: torch.Tensor, old: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Squared distance of new keys or values from the old ones at ascending ``positions``.

    Parameters
    ----------
    new, old : torch.Tensor
        ``[kv_heads, rows, dim]`` and ``[kv_heads, tokens, dim]``.
    positions : sequence of int
        Ascending positions among the tokens.

    Returns
    -------
    torch.Tensor
        ``[rows]`` float32, summed over heads and dimensions.

    Raises
    ------
    ValueError
        If the positions are not ascending or lie outside the tokens, or the shapes do not fit.

    Notes
    -----
    CacheBlend (EPIC section 2.3).
    """
    rows = checked_rows(new, old, positions)
    if (new.shape[0], new.shape[2]) != (old.shape[0], old.shape[2]):
        raise ValueError(f"rows {tuple(new.shape)} and {tuple(old.shape)} differ in heads or dimensions")
    in_torch = partial(reference.kv_deviation, new, old, rows.positions)
    if not rows or not uses_triton(new.device):
        return in_torch()
    from ragcachekit_kernels.scores import deviation

    kernel = partial(deviation.kv_deviation, new, old, rows.on(new.device))
    return attempt(_case("deviation", new), kernel, in_torch)


def _case(kernel: str, tensor: torch.Tensor) -> Hashable:
    return kernel, str(tensor.device), str(tensor.dtype), tensor.shape[2]


def _check_spans(tokens: int, spans: Sequence[tuple[int, int]] | None) -> None:
    for start, stop in spans or ():
        if not 0 <= start <= stop <= tokens:
            raise ValueError(f"the span {start}..{stop} does not lie within {tokens} keys")
