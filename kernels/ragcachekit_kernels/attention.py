"""Sparse-row attention in Triton: query rows at any ascending positions over contiguous keys and values.

A tile is ``BLOCK_M`` query vectors of one KV head, ordered by row, then by the query heads that share the KV
head. No group size wastes part of a tile, and a tile of distant rows still spans few positions. Its keys have
three ranges: those that the window hides from some rows, those that every row sees (no masks), and those
after the position of the first row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ragcachekit_kernels.arguments import AttentionOptions
from ragcachekit_kernels.launch import FUSED, dense, factors, launching_on, padded, processors, upcast

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

QUESTION_ROWS = 64
"""Rows assumed to see all keys when splits are chosen; the others are assumed to be spread evenly."""

UNIT = 128
"""Keys per unit of length when splits are chosen."""

MERGED = 8
"""Query vectors per program that merges splits."""


@dataclass(frozen=True)
class Config:
    """Compile and launch options of the kernel."""

    block_m: int  # query vectors of a tile, a power of two from 16 on
    block_n: int  # keys of a tile, likewise
    warps: int
    stages: int  # loads in flight, of the keys and values of one ``block_n`` each
    descriptors: bool = False  # load by the tensor memory accelerator: no registers for addresses
    resident: int = 1  # programs per multiprocessor that all items are divided among; 0: one per item


# By element size and padded head_dim. Compiled for Hopper (tests/kernels/test_compiled.py) they have no
# spills in the loop over keys and fit into 227 KiB of shared memory, with three stages if possible.
_HOPPER = {
    2: {size: Config(128, 32 if size == 256 else 128, 8, 3, True) for size in (64, 128, 256)},
    4: {size: Config(32 if size == 256 else 64, 32, 8, 2) for size in (64, 128, 256)},
}
_HOPPER_POINTERS = {
    2: {64: Config(128, 128, 8, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 2)},
    4: _HOPPER[4],
}
# Within 99 KiB, the smallest shared memory; by element size and padded head_dim, block_m and block_n.
_TILES = {2: {64: (128, 64), 128: (64, 64), 256: (64, 32)}, 4: {64: (64, 32), 128: (32, 32), 256: (16, 16)}}
_OTHER = {
    itemsize: {size: Config(*tile, 4, 2, resident=0) for size, tile in tiles.items()}
    for itemsize, tiles in _TILES.items()
}


# -- kernels -------------------------------------------------------------------------------------------


@triton.jit
def _lane(step, program, programs):
    """A program's place in a round: to and fro, so that who got the longest item next gets the shortest."""
    return program + (step % 2) * (programs - 1 - 2 * program)


@triton.jit
def _steps(items, lane, programs):
    """Rounds in which a program has an item; ``lane`` is its own in the last round, which may not be full."""
    return (items + programs - 1 - lane) // programs


@triton.jit
def _load(
    source, head, start, end, STRIDE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, CHECKED: tl.constexpr, DESCRIPTORS: tl.constexpr
):  # fmt: skip
    """``[BLOCK, PADDED]`` rows from ``start`` on: zero past DIM and, where CHECKED, from ``end`` on."""
    at = start + tl.arange(0, BLOCK)
    dim = tl.arange(0, PADDED)
    if DESCRIPTORS:
        rows = source.load([head, start, 0]).reshape(BLOCK, PADDED)
        if CHECKED:
            rows = tl.where((at < end)[:, None], rows, 0.0)
    else:
        inner = tl.arange(0, BLOCK)[:, None] * STRIDE + dim[None, :]
        pointers = source + tl.cast(start, tl.int64) * STRIDE + inner
        if CHECKED:
            rows = tl.load(pointers, mask=(at < end)[:, None] & (dim < DIM)[None, :], other=0.0)
        elif DIM == PADDED:
            rows = tl.load(pointers)
        else:
            rows = tl.load(pointers, mask=(dim < DIM)[None, :], other=0.0)
    return rows


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    if UPCAST:  # Triton's interpreter computes bfloat16 products wrongly
        acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _over(
    acc, top, total, low, high, query, at, key, value, head, scale, cap, window,
    KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr
):  # fmt: skip
    """Online softmax over the keys ``low..high``, in float32 and to base 2.

    The scale is multiplied into the scores (an FMA with the subtraction of the maximum), not into the query:
    that would round the query a second time.
    """
    # Keys past the end are masked as scores, so only pointers need care. Values would spread a NaN.
    CHECK_KEYS: tl.constexpr = MASKED and not DESCRIPTORS
    for start in tl.range(low, high, BLOCK_N):
        keys = _load(key, head, start, high, KEY_ROW, BLOCK_N, D, D_PAD, CHECK_KEYS, DESCRIPTORS)
        scores = _dot(query, tl.trans(keys), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST)
        if SOFTCAP:  # cap * tanh(x) = cap - 2 cap / (e^(2x) + 1); scale turns scores into 2x, to base 2
            scores = cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)
        if MASKED:
            column = (start + tl.arange(0, BLOCK_N))[None, :]
            seen = column <= at[:, None]
            if WINDOW:
                seen &= column > at[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        factor = 1.0 if SOFTCAP else scale
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        base = higher
        if MASKED:  # a row that has seen nothing yet
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        values = _load(value, head, start, high, VALUE_ROW, BLOCK_N, DV, DV_PAD, MASKED, DESCRIPTORS)
        acc = _dot(weights.to(values.dtype), values, acc, UPCAST)
        top = higher
    return acc, top, total


@triton.jit(do_not_specialize=["window", "splits", "rows"])
def attention_kernel(
    query, key, value, out, lse, positions, sinks, scale, cap, window, splits, rows,
    query_head, query_row, key_head, value_head, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr
):  # fmt: skip
    """Items are (tile, KV head, split of its keys), longest tiles first, dealt to a persistent grid."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    vectors = rows * GROUP
    tiles = tl.cdiv(vectors, BLOCK_M)
    items = tiles * KV_HEADS * splits
    lane = _lane(items // programs, program, programs)
    for step in range(0, _steps(items, lane, programs)):
        item = step * programs + _lane(step, program, programs)
        split = item % splits
        head = item // splits % KV_HEADS
        tile = tiles - 1 - item // splits // KV_HEADS

        # Rows of the tile; those past the end take part with a query of zeros and are not stored.
        flat = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row = flat // GROUP
        vector = head * GROUP + flat % GROUP
        inside = flat < vectors
        first = tl.load(positions + tile * BLOCK_M // GROUP)
        last = tl.load(positions + (tl.minimum(tile * BLOCK_M + BLOCK_M, vectors) - 1) // GROUP)
        at = tl.load(positions + row, mask=inside, other=last)
        dim = tl.arange(0, D_PAD)
        start = row.to(tl.int64) * query_row + vector.to(tl.int64) * query_head
        mask = inside[:, None]
        if D != D_PAD:
            mask = mask & (dim < D)[None, :]
        queries = tl.load(query + start[:, None] + dim[None, :], mask=mask, other=0.0)

        if DESCRIPTORS:
            of_keys = key
            of_values = value
        else:
            of_keys = key + head.to(tl.int64) * key_head
            of_values = value + head.to(tl.int64) * value_head

        # Ends of the ranges; all but the last lie whole blocks from the first key.
        begin = 0
        clear = 0  # from here on the window hides nothing
        if WINDOW:
            begin = tl.maximum(first - window + 1, 0)
            clear = begin + tl.cdiv(tl.maximum(last - window + 1 - begin, 0), BLOCK_N) * BLOCK_N
        open_end = begin + (first + 1 - begin) // BLOCK_N * BLOCK_N
        low = begin
        high = last + 1
        if SPLIT:
            blocks = tl.cdiv(high - begin, BLOCK_N)
            low = begin + blocks * split // splits * BLOCK_N
            high = tl.minimum(begin + blocks * (split + 1) // splits * BLOCK_N, high)

        acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if WINDOW:
            acc, top, total = _over(
                acc, top, total, low, tl.minimum(high, clear),
                queries, at, of_keys, of_values, head, scale, cap, window, KEY_ROW, VALUE_ROW, D, DV, D_PAD,
                DV_PAD, BLOCK_M, BLOCK_N, True, WINDOW, SOFTCAP, DESCRIPTORS, UPCAST,
            )  # fmt: skip
        acc, top, total = _over(
            acc, top, total, tl.maximum(low, clear), tl.minimum(high, open_end),
            queries, at, of_keys, of_values, head, scale, cap, window, KEY_ROW, VALUE_ROW, D, DV, D_PAD,
            DV_PAD, BLOCK_M, BLOCK_N, False, WINDOW, SOFTCAP, DESCRIPTORS, UPCAST,
        )  # fmt: skip
        acc, top, total = _over(
            acc, top, total, tl.maximum(low, tl.maximum(clear, open_end)), high,
            queries, at, of_keys, of_values, head, scale, cap, window, KEY_ROW, VALUE_ROW, D, DV, D_PAD,
            DV_PAD, BLOCK_M, BLOCK_N, True, WINDOW, SOFTCAP, DESCRIPTORS, UPCAST,
        )  # fmt: skip

        if SINKS and not SPLIT:
            sink = tl.load(sinks + vector).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.exp2(sink - higher)
            acc = acc * shrink[:, None]
            top = higher
        # Each query vector of the output: token by token, its heads side by side; one plane per split.
        place = (split * rows + row).to(tl.int64) * (KV_HEADS * GROUP) + vector
        if SPLIT:
            acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # a split may hide all its keys from a row
            tl.store(
                lse + place, tl.where(total > 0.0, top + tl.log2(tl.maximum(total, 1e-30)), top), mask=inside
            )
        else:
            acc = acc / total[:, None]
        dim_out = tl.arange(0, DV_PAD)
        mask_out = inside[:, None]
        if DV != DV_PAD:
            mask_out = mask_out & (dim_out < DV)[None, :]
        tl.store(out + place[:, None] * DV + dim_out[None, :], acc.to(out.dtype.element_ty), mask=mask_out)


@triton.jit(do_not_specialize=["splits", "rows"])
def merge_kernel(
    parts, lse, out, sinks, splits, rows, HEADS: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr
):  # fmt: skip
    """Outputs of the splits weighted by their log-sum-exps (to base 2); sinks are counted here, once."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < rows * HEADS
    dim = tl.arange(0, DV_PAD)
    mask = inside[:, None]
    if DV != DV_PAD:
        mask = mask & (dim < DV)[None, :]
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if SINKS:
        top = tl.load(sinks + flat % HEADS).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([BLOCK, DV_PAD], tl.float32)
    for split in tl.range(0, splits):
        place = tl.cast(split, tl.int64) * rows * HEADS + flat
        part = tl.load(lse + place, mask=inside, other=0.0)
        values = tl.load(parts + place[:, None] * DV + dim[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, part)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(part - base)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + values * weight[:, None]
        top = higher
    place = flat.to(tl.int64)
    acc = acc / total[:, None]
    tl.store(out + place[:, None] * DV + dim[None, :], acc.to(out.dtype.element_ty), mask=mask)


# -- launches ------------------------------------------------------------------------------------------


def config_for(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    *,
    described: bool = True,
    plain: bool = True,
    capability: tuple[int, int] | None = None,
) -> Config:
    """Config for heads of up to ``width`` dimensions.

    ``described``: descriptors can load keys and values. ``plain``: no window and no soft-cap. ``capability``
    is that of the device, unless given.
    """
    if device.type != "cuda":  # the interpreter: small tiles, so that tests see several
        return Config(32, 16, 4, 1, descriptors=described)
    if capability is None:
        capability = torch.cuda.get_device_capability(device)
    configs = _OTHER if capability[0] != 9 else _HOPPER if described else _HOPPER_POINTERS
    config = configs[dtype.itemsize][max(64, padded(width))]
    # Windows and soft-caps need registers: with 128 keys the loops would spill.
    return config if plain else replace(config, block_n=min(config.block_n, 64))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    options: AttentionOptions,
    *,
    config: Config | None = None,
    splits: int | None = None,
) -> Tensor:
    """Output ``[heads, rows, value_dim]``, a view of token-major memory; ``positions`` are int32.

    The last dimension of keys and values must be contiguous; head and row strides are free.
    """
    (heads, rows, head_dim), kv_heads, value_dim = query.shape, key.shape[0], value.shape[2]
    query = dense(query)
    width, both = max(head_dim, value_dim), described(key) and described(value)
    if config is None:
        config = config_for(query.device, query.dtype, width, described=both, plain=options.is_plain)
    config = replace(config, descriptors=config.descriptors and both)
    scale, cap = factors(options)
    programs = processors(query.device) * max(config.resident, 1)
    if splits is None:
        splits = _splits(heads, rows, kv_heads, key.shape[1], options.window, config, programs)
    items = triton.cdiv(rows * heads // kv_heads, config.block_m) * kv_heads * splits
    out = parts = query.new_empty(rows, heads, value_dim)
    lse = None
    if splits > 1:
        parts = query.new_empty(splits, rows, heads, value_dim, dtype=torch.float32)
        lse = query.new_empty(splits, rows, heads, dtype=torch.float32)
    sinks = None if options.sinks is None else options.sinks.contiguous()
    read = [_descriptor(side, config) if config.descriptors else side for side in (key, value)]
    with launching_on(query.device):
        attention_kernel[(min(items, programs) if config.resident else items,)](
            query, *read, parts, lse, positions, sinks, scale, cap, options.window or 0, splits, rows,
            *query.stride()[:2], key.stride(0), value.stride(0), KEY_ROW=key.stride(1),
            VALUE_ROW=value.stride(1), KV_HEADS=kv_heads, GROUP=heads // kv_heads, D=head_dim, DV=value_dim,
            D_PAD=padded(head_dim), DV_PAD=padded(value_dim), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            WINDOW=options.window is not None, SOFTCAP=options.softcap is not None, SINKS=sinks is not None,
            SPLIT=splits > 1, DESCRIPTORS=config.descriptors, UPCAST=upcast(query.dtype),
            num_warps=config.warps, num_stages=config.stages, **FUSED,
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(triton.cdiv(rows * heads, MERGED),)](
                parts, lse, out, sinks, splits, rows, HEADS=heads, DV=value_dim, DV_PAD=padded(value_dim),
                BLOCK=MERGED, SINKS=sinks is not None, num_warps=4, **FUSED,
            )  # fmt: skip
    return out.transpose(0, 1)


def described(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can load ``tensor``: address and strides in 16 bytes."""
    strides = (stride * tensor.itemsize for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 and stride > 0 for stride in strides)


def _descriptor(tensor: Tensor, config: Config) -> TensorDescriptor:
    block = [1, config.block_n, padded(tensor.shape[-1])]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _splits(
    heads: int, rows: int, kv_heads: int, tokens: int, window: int | None, config: Config, programs: int
) -> int:
    group = heads // kv_heads
    blocks = triton.cdiv(rows * group, config.block_m)
    question = triton.cdiv(min(rows, QUESTION_ROWS) * group, config.block_m)
    units = triton.cdiv(tokens if window is None else min(tokens, window), UNIT)
    coarse = units if units <= 64 else triton.cdiv(units, 16) * 16  # few distinct arguments for the cache
    return splits_for(blocks, question, kv_heads, programs, coarse)


@lru_cache(maxsize=4096)
def splits_for(blocks: int, question_blocks: int, kv_heads: int, programs: int, units: int) -> int:
    """Number of splits of each tile's keys that minimises the largest load of a program, merging included.

    Lengths, in ``UNIT`` keys, are modelled: the last ``question_blocks`` of the ``blocks`` of rows see all
    ``units``, the others are spread evenly.
    """
    if blocks * kv_heads >= 4 * programs:
        return 1  # enough tiles to balance without splits
    lengths = torch.full((blocks,), float(units))
    spread = blocks - min(question_blocks, blocks)
    lengths[blocks - spread :] = torch.linspace(units, 1, spread)

    def load(splits: int) -> float:
        """Largest load of a program, with items divided as in the kernel."""
        items = (lengths / splits).ceil().repeat_interleave(kv_heads * splits)
        rounds = torch.nn.functional.pad(items, (0, -len(items) % programs)).view(-1, programs)
        rounds[1::2] = rounds[1::2].flip(1)
        # Estimated for a Hopper GPU: writing and reading an item's output costs 1.6 units, a second launch 2.
        merging = 2 + 1.6 * len(items) / programs if splits > 1 else 0.0
        return float(rounds.sum(0).max()) + merging

    return min((splits for splits in SPLITS if splits <= units), key=load)
