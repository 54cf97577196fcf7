"""Triton kernels of column scores: log-sum-exps of rows, and sums of weights per key."""

from __future__ import annotations

import triton
import triton.language as tl

from ragcachekit_kernels.scores.tiles import (
    cut_of_span,
    dot,
    exponentials,
    load_keys,
    load_positions,
    load_tile,
    log_sum,
    place_in_tile,
    ranges,
    softcapped,
)


@triton.jit
def _spread(
    sums, known, turned, positions, tile, vectors, base, key, stride, low, high, stop, scale, cap, window,
    GROUP: tl.constexpr, ADD: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Add every query's weights to the sums of the keys ``low..high``; sums from ``known`` on are not read.

    Keys are the rows of the product here: a sum over queries stays within a warp.
    """
    for start in tl.range(low, high, BLOCK):
        keys = load_keys(key, start, stop, stride, MASKED, D, PADDED, BLOCK)
        scores = softcapped(dot(keys, turned, UPCAST), scale, cap, SOFTCAP)
        column = start + tl.arange(0, BLOCK)
        if MASKED:
            at = load_positions(positions, tile, vectors, GROUP, VECTORS)
            seen = (column[:, None] <= at[None, :]) & (column < stop)[:, None]
            if WINDOW:
                seen = seen & (column[:, None] > at[None, :] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.sum(exponentials(scores - base[None, :], scale, SOFTCAP), 1)
        if ADD:
            new += tl.load(sums + column, mask=column < known, other=0.0)
        tl.store(sums + column, new, mask=column < stop)


@triton.jit(do_not_specialize=["cuts", "window", "tokens"])
def log_sums_kernel(
    query, key, positions, count, spans, out, scale, cap, window, cuts, tokens, room, query_head, query_row,
    key_head, key_row, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    VECTORS: tl.constexpr, BLOCK: tl.constexpr, SPANS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Per span, cut, row and head: the log-sum-exp of the scores of the cut's keys, as a score."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    vectors = tl.load(count) * GROUP
    if tile * VECTORS >= vectors:
        return
    start, stop = cut_of_span(spans, part // cuts, part % cuts, cuts, tokens, SPANS, BLOCK)
    queries, first, last = load_tile(
        query, positions, vectors, tile, kv_head, query_row, query_head, GROUP, D, PADDED, VECTORS
    )
    result = log_sum(
        queries, positions, tile, vectors, first, last, key + kv_head.to(tl.int64) * key_head, key_row, start,
        stop, scale, cap, window, GROUP, WINDOW, SOFTCAP, D, PADDED, BLOCK, VECTORS, UPCAST,
    )  # fmt: skip
    row, head, inside = place_in_tile(tile, kv_head, vectors, GROUP, VECTORS)
    place = (part * room + row).to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(out + place, result, mask=inside)


@triton.jit
def _add_tile(
    sums, known, query, positions, tile, vectors, kv_head, key, lse, start, stop, scale, cap, window,
    query_head, query_row, key_row, lse_head, lse_row, GROUP: tl.constexpr, D: tl.constexpr,
    PADDED: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    LSE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add one tile's weights to the sums of the keys ``start..stop``."""
    queries, first, last = load_tile(
        query, positions, vectors, tile, kv_head, query_row, query_head, GROUP, D, PADDED, VECTORS
    )
    row, head, inside = place_in_tile(tile, kv_head, vectors, GROUP, VECTORS)
    if LSE:
        place = row.to(tl.int64) * lse_row + head.to(tl.int64) * lse_head
        base = tl.load(lse + place, mask=inside, other=float("inf"))
    else:
        base = log_sum(
            queries, positions, tile, vectors, first, last, key, key_row, start, stop, scale, cap, window,
            GROUP, WINDOW, SOFTCAP, D, PADDED, BLOCK, VECTORS, UPCAST,
        )  # fmt: skip
    # Past the end, and where a row sees nothing of the span: no weight at all.
    base = tl.where(inside & (base != float("-inf")), base, float("inf"))
    begin, clear, whole, end = ranges(start, stop, first, last, window, WINDOW, BLOCK)
    turned = tl.trans(queries)  # once for all three: each use apart would go to shared memory anew
    if WINDOW:
        _spread(
            sums, known, turned, positions, tile, vectors, base, key, key_row, begin,
            tl.minimum(clear, end), stop, scale, cap, window, GROUP, ADD, True, WINDOW, SOFTCAP, D, PADDED,
            BLOCK, VECTORS, UPCAST,
        )  # fmt: skip
    _spread(
        sums, known, turned, positions, tile, vectors, base, key, key_row, clear, whole, stop, scale,
        cap, window, GROUP, ADD, False, WINDOW, SOFTCAP, D, PADDED, BLOCK, VECTORS, UPCAST,
    )  # fmt: skip
    _spread(
        sums, known, turned, positions, tile, vectors, base, key, key_row, whole, end, stop, scale,
        cap, window, GROUP, ADD, True, WINDOW, SOFTCAP, D, PADDED, BLOCK, VECTORS, UPCAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["cuts", "window", "tokens"])
def columns_kernel(
    query, key, positions, count, spans, lse, out, scale, cap, window, cuts, tokens, query_head, query_row,
    key_head, key_row, lse_span, lse_head, lse_row, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr, SPANS: tl.constexpr,
    LSE: tl.constexpr, ONCE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Sums of weights per key into ``out[slot, kv_head]``, zeros before; tiles are dealt to the slots.

    Programs that share keys are neighbours: the first of them brings the keys into the L2 cache. Without
    LSE each program finds the log-sum-exps of its keys first.
    """
    slot, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = part // cuts
    start, stop = cut_of_span(spans, span, part % cuts, cuts, tokens, SPANS, BLOCK)
    vectors = tl.load(count) * GROUP
    keys = key + kv_head.to(tl.int64) * key_head
    sums = out + (slot * KV_HEADS + kv_head).to(tl.int64) * tokens
    own = lse + span.to(tl.int64) * lse_span
    if ONCE:
        if slot * VECTORS < vectors:
            _add_tile(
                sums, 0, query, positions, slot, vectors, kv_head, keys, own, start, stop, scale, cap, window,
                query_head, query_row, key_row, lse_head, lse_row, GROUP, D, PADDED, VECTORS, BLOCK, False,
                LSE, WINDOW, SOFTCAP, UPCAST,
            )  # fmt: skip
    else:
        for tile in tl.range(slot, tl.cdiv(vectors, VECTORS), tl.num_programs(0), num_stages=1):
            known = tl.minimum(tile - slot, 1) * stop  # the first tile finds nothing to add to
            _add_tile(
                sums, known, query, positions, tile, vectors, kv_head, keys, own, start, stop, scale, cap,
                window, query_head, query_row, key_row, lse_head, lse_row, GROUP, D, PADDED, VECTORS, BLOCK,
                True, LSE, WINDOW, SOFTCAP, UPCAST,
            )  # fmt: skip
            tl.debug_barrier()  # the next tile reads what other threads of this program have stored
