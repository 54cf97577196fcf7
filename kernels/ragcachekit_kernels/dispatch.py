"""Public functions and types of the kernels: callers import from here and nowhere else.

Every function chooses between Triton and torch by the device, the types and what Triton could compile.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from ragcachekit_kernels import in_torch
from ragcachekit_kernels.arguments import (
    AttentionOptions,
    Group,
    Groups,
    Place,
    Places,
    Rotation,
    Rows,
    Spans,
    checked_rows,
    spans_within,
)
from ragcachekit_kernels.in_torch import ContextMass, rotate
from ragcachekit_kernels.launch import interpreted

# fmt: off
__all__ = [
    "AttentionOptions", "ContextMass", "Group", "Groups", "Place", "Places", "Rotation", "Rows", "Spans",
    "assemble", "attention_choice", "choice", "column_scores", "context_mass", "kv_deviation", "move_alike",
    "rotate", "span_sums", "sparse_attention", "uses_triton",
]
# fmt: on

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

SETTING = "RAGCACHEKIT_KERNELS"
"""Environment variable: ``auto`` (default), ``torch`` (never Triton) or ``triton``.

``triton`` includes CPUs, in Triton's interpreter only (``TRITON_INTERPRET=1``; slow, for tests)."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types that the kernels compute with."""

# Per process, like Triton's own cache: without it, a refused kernel would be compiled again at each call.
_refused: dict[Hashable, str] = {}


def assemble(
    out: Tensor, tensors: Sequence[Tensor], places: Places, rotation: Rotation | None = None
) -> None:
    """Write pieces of chunk KV to their places in the keys or the values of one layer (EPIC section 4.1).

    ``out`` is ``[heads, slots, dim]``, one slot per position, the last dimension contiguous; ``tensors`` are
    per place ``[heads, tokens, dim]`` on its device. ``places`` are made once for a prompt, so that all
    layers share one copy on the device. ``rotation`` rotates pieces whose place is not ``rotated``, in
    float32; the result is rounded once.

    ValueError if shapes do not fit together, or places lie outside of the slots.
    """
    _check_assembly(out, tensors, places, rotation)
    fits = {out.dtype, *(tensor.dtype for tensor in tensors)} <= set(DTYPES)

    def in_triton() -> None:
        from ragcachekit_kernels import assembly

        assembly.assemble(out, tensors, places, rotation)

    case = _case("assembly", out, *tensors) if tensors and fits and uses_triton(out.device) else None
    _run(case, in_triton, lambda: in_torch.assemble(out, tensors, places, rotation))


def _check_assembly(
    out: Tensor, tensors: Sequence[Tensor], places: Places, rotation: Rotation | None
) -> None:
    heads, slots, dim = out.shape
    if out.stride(2) != 1 or slots < places.stop:
        raise ValueError(f"places end at {places.stop}; {tuple(out.shape)} does not hold that row by row")
    if len(tensors) != len(places):
        raise ValueError(f"{len(places)} places need as many tensors")
    for tensor, place in zip(tensors, places, strict=True):
        if tensor.shape != (heads, place.tokens, dim):
            raise ValueError(f"a piece {tuple(tensor.shape)} does not fit {heads} heads, {place} and {dim}")
    if rotation is not None:
        positions, pairs = rotation.cos.shape
        if rotation.sin.shape != rotation.cos.shape or positions < places.stop:
            raise ValueError(f"cos and sin must be of equal shape, with {places.stop} rows or more")
        if rotation.offset + 2 * pairs > dim:
            raise ValueError(f"{pairs} pairs from {rotation.offset} on do not fit into {dim}")


def move_alike(
    sides: tuple[Tensor, Tensor],
    moves: tuple[Tensor, Tensor],
    alike: Tensor,
    by: int,
    groups: Groups,
    rotations: tuple[Rotation | None, Rotation | None],
) -> None:
    """Move rows of one layer in place by what rows that are like them were moved by (docs/selection.md).

    ``sides`` are keys and values ``[kv_heads, tokens, dim]``, the last dimension contiguous. ``moves``,
    float32, are those of the recomputed rows, ``[kv_heads, rows, dim]``, without RoPE. A row x moves by the
    mean of its group's moves, weighted by ``exp(x . alike / |x|)`` and rotated to the row's position by
    ``rotations``. x is compared on side ``by``; ``alike``, float32, is ``[kv_heads, rows, dim]`` and shorter
    than 80, for the exponential. Rows outside of ``groups`` stay.

    ValueError if a group lies outside of the tokens or of the rows.
    """
    tokens, rows = sides[0].shape[1], alike.shape[1]
    if groups and (groups[-1].stop > tokens or groups[-1].last > rows):
        raise ValueError(f"{groups[-1]} does not lie within {tokens} tokens and {rows} recomputed rows")

    def in_triton() -> None:
        from ragcachekit_kernels import moves as kernels

        kernels.move_alike(sides, moves, alike, by, groups, rotations)

    fits = {side.dtype for side in sides} <= set(DTYPES) and uses_triton(alike.device)
    case = _case("moves", *sides) if groups and fits else None
    _run(case, in_triton, lambda: in_torch.move_alike(sides, moves, alike, by, groups, rotations))


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Sequence[int], options: AttentionOptions
) -> Tensor:
    """Attention of rows at ascending ``positions``: row i sees exactly keys ``0..positions[i]``.

    ``query`` is ``[heads, rows, head_dim]``; ``key`` and ``value`` are ``[kv_heads, tokens, head_dim]``, key
    j at position j; heads is a multiple of kv_heads. :class:`Rows` are checked and put on the device once,
    however many calls use them. Returns ``[heads, rows, value_head_dim]``, on a GPU a view of ``[rows, heads,
    value_head_dim]``. ValueError for positions that do not ascend or lie outside the keys.

    All keys and values up to a row's position must be finite, those that a neighbouring row sees too: a
    weight of zero times NaN is NaN. EPIC section 4.2 prints a multiplicative mask; this one is additive.
    """
    rows = checked_rows(query, key, positions)

    def in_triton() -> Tensor:
        from ragcachekit_kernels.attention import attention

        return attention(query, key, value, rows.on(key.device), options)

    fits = rows and attention_choice(query, key, value) == "triton"
    case = _case("attention", key, value) if fits else None
    return _run(case, in_triton, lambda: in_torch.attend(query, key, value, rows, options))


def column_scores(
    query: Tensor,
    key: Tensor,
    positions: Sequence[int],
    options: AttentionOptions,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Attention that each key gets from rows at ascending ``positions``, summed over heads and rows.

    Arguments and errors are those of :func:`sparse_attention`. ``spans`` are half-open key ranges that do not
    overlap (ValueError if one does not lie within the keys): each gets a softmax of its own, without sinks,
    and keys outside of all get 0 (FusionRAG section 3.2). None: one softmax over all keys that the row sees
    (Cache-Craft section 3.1). :class:`Spans` are put on the device once, however many calls use them.

    Returns ``[tokens]``, float32 or wider.
    """
    rows = checked_rows(query, key, positions)
    ranges = None if spans is None else spans_within(spans, key.shape[1])

    def in_triton() -> Tensor:
        from ragcachekit_kernels import scores

        return scores.column_scores(query, key, rows.on(key.device), options, ranges)

    case = _case("scores", key) if rows and choice("scores", query, key) == "triton" else None
    return _run(case, in_triton, lambda: in_torch.column_scores(query, key, rows.items, options, ranges))


def context_mass(
    query: Tensor, key: Tensor, positions: Sequence[int], lengths: Sequence[int], options: AttentionOptions
) -> ContextMass:
    """Attention of a chunk's rows: per key, per segment, and per row the part before the chunk.

    The inter and intra sums of Cache-Craft section 3.1. ``lengths`` are the tokens of the segments that the
    keys consist of, the chunk's own last; all else, and errors, as for :func:`column_scores`.
    """
    rows = checked_rows(query, key, positions)
    if sum(lengths) != key.shape[1] or not lengths:
        raise ValueError(f"segments of {list(lengths)} tokens do not make up {key.shape[1]} keys")

    def in_triton() -> ContextMass:
        from ragcachekit_kernels import scores

        return scores.context_mass(query, key, rows.on(key.device), lengths, options)

    case = _case("scores", key) if rows and choice("scores", query, key) == "triton" else None
    return _run(case, in_triton, lambda: in_torch.context_mass(query, key, rows.items, lengths, options))


def span_sums(values: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Sums of ``values`` ``[tokens]`` over half-open ranges, ``[spans]`` float64.

    ValueError if a span does not lie within the values.
    """
    return in_torch.span_sums(values, spans_within(spans, values.shape[0]))


def kv_deviation(new: Tensor, old: Tensor, positions: Sequence[int]) -> Tensor:
    """Squared distance of new keys or values from the old ones at ascending ``positions`` (CacheBlend).

    ``new`` is ``[kv_heads, rows, dim]``, ``old`` ``[kv_heads, tokens, dim]``. Returns ``[rows]`` float32,
    summed over heads and dimensions. ValueError for positions that do not ascend or lie outside the tokens,
    and for shapes that do not fit.
    """
    rows = checked_rows(new, old, positions)
    if (new.shape[0], new.shape[2]) != (old.shape[0], old.shape[2]):
        raise ValueError(f"rows {tuple(new.shape)} and {tuple(old.shape)} differ in heads or dimensions")
    return in_torch.kv_deviation(new, old, rows.items)


# -- the choice between Triton and torch ---------------------------------------------------------------


def uses_triton(device: torch.device) -> bool:
    """Whether tensors on ``device`` go to the Triton kernels, as far as these support the case.

    Never on devices other than ``cuda`` and ``cpu``: MPS, for one, takes the torch path. ValueError if the
    environment variable has an unknown value, or asks for Triton where it cannot run.
    """
    wanted = os.environ.get(SETTING, "auto")
    if wanted not in ("auto", "torch", "triton"):
        raise ValueError(f"{SETTING}={wanted!r} is not known; use auto, torch or triton")
    if wanted == "torch" or device.type not in ("cuda", "cpu"):
        return False
    available = sys.platform == "linux" and _installed()
    if wanted == "auto":
        return device.type == "cuda" and available
    if not available:
        raise ValueError(f"{SETTING}=triton, but Triton is not installed, or this is not Linux")
    if device.type == "cpu" and not interpreted():
        raise ValueError(f"{SETTING}=triton on a CPU needs TRITON_INTERPRET=1, set before triton is imported")
    return True


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def attention_choice(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Implementation for these tensors: ``triton``, ``torch``, or ``torch: `` and why not Triton."""
    found = choice("attention", query, key, value)
    if found == "triton" and (key.stride(2) != 1 or value.stride(2) != 1):
        return "torch: the last dimension of keys or values is not contiguous"
    return found


def choice(kernel: str, query: Tensor, *others: Tensor) -> str:
    """Implementation for attention of these tensors: ``triton``, ``torch``, or ``torch: `` and why."""
    if not uses_triton(others[0].device):
        return "torch"
    types = [str(t.dtype).removeprefix("torch.") for t in (query, *others)]
    if len(set(types)) > 1 or query.dtype not in DTYPES:
        return f"torch: {types[0]} over {' and '.join(types[1:])}"
    if (width := max(t.shape[2] for t in others)) > 256:
        return f"torch: head_dim {width} is more than 256"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, *others)):
        return "torch: gradients are asked for"
    refused = _refused.get(_case(kernel, *others))
    return f"torch: {refused}" if refused else "triton"


def _case(kernel: str, *tensors: Tensor) -> Hashable:
    """Name of what a kernel is compiled for: device, types and last dimensions of its tensors."""
    return kernel, str(tensors[0].device), *((str(t.dtype), *t.shape[2:]) for t in tensors)


def _run(case: Hashable, kernel: Callable[[], Result], instead: Callable[[], Result]) -> Result:
    """Result of ``kernel``; of ``instead`` without a ``case``, or if Triton cannot compile or launch it.

    A refused case is logged once and goes to ``instead`` from then on. ``instead`` must be correct after a
    partial launch of ``kernel``.
    """
    if case is None or case in _refused:
        return instead()
    try:
        return kernel()
    except Exception as error:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        # Not for errors of its arguments or the device's state. The compiler's passes have no class of their
        # own.
        of_passes = isinstance(error, RuntimeError) and "PassManager::run failed" in str(error)
        if not of_passes and not isinstance(error, (CompilationError, OutOfResources, PTXASError)):
            raise
        reason = f"Triton gave up ({type(error).__name__})"
        if _refused.setdefault(case, reason) is reason:
            _log.warning("%s: torch computes %s from now on: %s", reason, case, str(error)[:500])
    return instead()
