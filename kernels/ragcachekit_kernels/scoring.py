"""What keys get from rows, and rows from keys: which implementation computes it.

Part of :mod:`ragcachekit_kernels.dispatch`, which is where to import these from.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import torch

from ragcachekit_kernels import reference, tiled
from ragcachekit_kernels.attending import attention_options
from ragcachekit_kernels.backend import uses_triton
from ragcachekit_kernels.context import ContextMass
from ragcachekit_kernels.fallback import attempt, refusal
from ragcachekit_kernels.rows import Rows
from ragcachekit_kernels.spans import Spans

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def scoring_choice(query: torch.Tensor, key: torch.Tensor) -> str:
    """Which implementation these tensors go to: ``triton``, ``torch``, or ``torch: `` and why not Triton."""
    if not uses_triton(key.device):
        return "torch"
    if query.dtype != key.dtype or key.dtype not in DTYPES:
        return f"torch: {query.dtype} over {key.dtype}".replace("torch.", "")
    if key.shape[2] > 256:
        return f"torch: head_dim {key.shape[2]} is more than 256"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return "torch: gradients are asked for"
    refused = refusal(_case("scores", key))
    return f"torch: {refused}" if refused else "triton"


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
    """Attention that each key gets from rows at ascending ``positions``, summed over heads and rows.

    Shapes, arguments and errors as in :func:`ragcachekit_kernels.reference.column_scores` and
    :func:`ragcachekit_kernels.dispatch.sparse_attention`. :class:`Rows` and :class:`Spans` are put on the
    device once, however many calls they serve.
    """
    rows = _rows(query, key, positions)
    _check_spans(key.shape[1], spans)
    if lse is not None and spans is not None:
        raise ValueError(
            "a log-sum-exp over all keys says nothing of the softmax over spans: give one of them"
        )
    if lse is not None and lse.shape != query.shape[:2]:
        raise ValueError(f"lse must be [heads, rows] = {tuple(query.shape[:2])}, got {tuple(lse.shape)}")
    options = {"lse": lse, **attention_options(scale, window, softcap, sinks)}
    in_torch = partial(tiled.column_scores, query, key, rows.positions, spans, **options)
    if not rows or scoring_choice(query, key) != "triton":
        return in_torch()
    from ragcachekit_kernels import column_scores as kernels

    ranges = spans if spans is None or isinstance(spans, Spans) else Spans(tuple(spans))
    kernel = partial(kernels.column_scores, query, key, rows.on(key.device), ranges, **options)
    return attempt(_case("scores", key), kernel, in_torch)


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
    """Where the attention of a chunk's rows goes: to which key and to which segment, and how much outward.

    Parameters
    ----------
    query, key, positions, scale, window, softcap, sinks
        As for :func:`column_scores`.
    lengths : sequence of int
        Of the segments that the keys consist of, the chunk's own last.

    Raises
    ------
    ValueError
        Also if the lengths do not add up to the number of keys.

    Notes
    -----
    Cache-Craft section 3.1 (inter and intra sums).
    """
    rows = _rows(query, key, positions)
    if sum(lengths) != key.shape[1] or not lengths:
        raise ValueError(f"segments of {list(lengths)} tokens do not make up {key.shape[1]} keys")
    options = attention_options(scale, window, softcap, sinks)
    in_torch = partial(tiled.context_mass, query, key, rows.positions, lengths, **options)
    if not rows or scoring_choice(query, key) != "triton":
        return in_torch()
    from ragcachekit_kernels import context_kernels

    kernel = partial(context_kernels.context_mass, query, key, rows.on(key.device), lengths, **options)
    return attempt(_case("scores", key), kernel, in_torch)


def span_sums(values: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Sums of ``values`` ``[tokens]`` over half-open ranges, ``[spans]`` float64.

    Raises
    ------
    ValueError
        If a span does not lie within the values.
    """
    _check_spans(values.shape[0], spans)
    if not uses_triton(values.device):
        return reference.span_sums(values, spans)
    from ragcachekit_kernels import deviation

    ranges = spans if isinstance(spans, Spans) else Spans(tuple(spans))
    case = "sums", str(values.device), str(values.dtype)
    in_torch = partial(reference.span_sums, values, spans)
    return attempt(case, partial(deviation.span_sums, values, ranges), in_torch)


def kv_deviation(new: torch.Tensor, old: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """How far rows lie from those at ascending ``positions`` of other keys or values.

    Parameters
    ----------
    new : torch.Tensor
        ``[kv_heads, rows, dim]``.
    old : torch.Tensor
        ``[kv_heads, tokens, dim]``.
    positions : sequence of int
        Ascending positions among the tokens.

    Returns
    -------
    torch.Tensor
        ``[rows]`` float32: the squared distance, summed over heads and dimensions.

    Raises
    ------
    ValueError
        If the positions are not ascending or lie outside the tokens, or the shapes do not fit.

    Notes
    -----
    CacheBlend (EPIC section 2.3).
    """
    rows = _rows(new, old, positions)
    if (new.shape[0], new.shape[2]) != (old.shape[0], old.shape[2]):
        raise ValueError(f"rows {tuple(new.shape)} and {tuple(old.shape)} differ in heads or dimensions")
    if not rows or not uses_triton(new.device):
        return reference.kv_deviation(new, old, rows.positions)
    from ragcachekit_kernels import deviation

    kernel = partial(deviation.kv_deviation, new, old, rows.on(new.device))
    in_torch = partial(reference.kv_deviation, new, old, rows.positions)
    return attempt(_case("deviation", new), kernel, in_torch)


def _case(kernel: str, tensor: torch.Tensor) -> Hashable:
    return kernel, str(tensor.device), str(tensor.dtype), tensor.shape[2]


def _rows(query: torch.Tensor, key: torch.Tensor, positions: Sequence[int]) -> Rows:
    rows = positions if isinstance(positions, Rows) else Rows(tuple(positions))
    if len(rows) != query.shape[1]:
        raise ValueError(f"{query.shape[1]} query rows but {len(rows)} positions")
    if query.shape[0] % key.shape[0]:
        raise ValueError(f"{query.shape[0]} query heads cannot share {key.shape[0]} KV heads")
    if rows and rows[-1] >= key.shape[1]:
        raise ValueError(f"positions must be ascending within 0..{key.shape[1] - 1}")
    return rows


def _check_spans(tokens: int, spans: Sequence[tuple[int, int]] | None) -> None:
    for start, stop in spans or ():
        if not 0 <= start <= stop <= tokens:
            raise ValueError(f"the span {start}..{stop} does not lie within {tokens} keys")
