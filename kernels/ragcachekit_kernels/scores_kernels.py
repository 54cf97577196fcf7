"""Triton kernels of column scores: log-sum-exps of rows, weights per key.

A tile is ``VECTORS`` query vectors of one KV head, with the order and the three key ranges of
:mod:`.attention`. Scores are unscaled (to base 2 with a soft-cap); only their differences are scaled.
Differences of near numbers are exact, so fused operations cannot make the two passes over the keys differ.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Float32 of 16-bit operands; of float32 ones to nearly their precision, in three products."""
    if UPCAST:  # Triton's interpreter computes bfloat16 products wrongly
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def softcapped(dots, scale, cap, SOFTCAP: tl.constexpr):
    """Scores of products. A soft-cap's ``scale`` makes them 2x: cap tanh(x) = cap - 2 cap / (e^2x + 1)."""
    if SOFTCAP:
        return cap - 2.0 * cap / (tl.exp2(tl.minimum(dots * scale, 126.0)) + 1.0)
    return dots


@triton.jit
def exponentials(differences, scale, SOFTCAP: tl.constexpr):
    """Exponentials of differences of scores."""
    if SOFTCAP:
        return tl.exp2(differences)
    return tl.exp2(differences * scale)


@triton.jit
def load_keys(key, start, stop, stride, CHECKED: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """``[BLOCK, PADDED]`` from ``start`` on; where CHECKED, zeros from ``stop`` on."""
    at = start + tl.arange(0, BLOCK)
    dim = tl.arange(0, PADDED)
    pointers = key + at.to(tl.int64)[:, None] * stride + dim[None, :]
    if CHECKED:
        return tl.load(pointers, mask=(at < stop)[:, None] & (dim < D)[None, :], other=0.0)
    if D == PADDED:
        return tl.load(pointers)
    return tl.load(pointers, mask=(dim < D)[None, :], other=0.0)


@triton.jit
def place_in_tile(tile, kv_head, vectors, GROUP: tl.constexpr, VECTORS: tl.constexpr):
    """Row and head of a tile's query vectors, and whether there is such a row."""
    flat = tile * VECTORS + tl.arange(0, VECTORS)
    return flat // GROUP, kv_head * GROUP + flat % GROUP, flat < vectors


@triton.jit
def load_tile(
    query, positions, vectors, tile, kv_head, row_stride, head_stride, GROUP: tl.constexpr, D: tl.constexpr,
    PADDED: tl.constexpr, VECTORS: tl.constexpr
):  # fmt: skip
    """A tile's query vectors (zeros past the end) and the least and the greatest of their positions."""
    row, head, inside = place_in_tile(tile, kv_head, vectors, GROUP, VECTORS)
    first = tl.load(positions + tile * VECTORS // GROUP)
    last = tl.load(positions + (tl.minimum(tile * VECTORS + VECTORS, vectors) - 1) // GROUP)
    dim = tl.arange(0, PADDED)
    mask = inside[:, None]
    if D != PADDED:
        mask = mask & (dim < D)[None, :]
    start = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    return tl.load(query + start[:, None] + dim[None, :], mask=mask, other=0.0), first, last


@triton.jit
def load_positions(positions, tile, vectors, GROUP: tl.constexpr, VECTORS: tl.constexpr):
    """Of a tile's query vectors, -1 past the end.

    Loaded where keys are masked, block by block: kept all the time they would cost a fifth of the registers.
    """
    flat = tile * VECTORS + tl.arange(0, VECTORS)
    return tl.load(positions + flat // GROUP, mask=flat < vectors, other=-1)


@triton.jit
def ranges(start, stop, first, last, window, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Where blocks of keys begin, where the window hides no more, where the future begins, where they end.

    All but the last lie whole blocks from ``start``.
    """
    begin = start
    clear = start
    if WINDOW:
        begin = start + tl.maximum(first - window + 1 - start, 0) // BLOCK * BLOCK
        clear = start + tl.cdiv(tl.maximum(last - window + 1 - start, 0), BLOCK) * BLOCK
    end = tl.minimum(stop, last + 1)
    whole = start + tl.maximum(tl.minimum(stop, first + 1) - start, 0) // BLOCK * BLOCK
    return begin, clear, tl.maximum(whole, clear), end


@triton.jit
def _gather(
    top, total, queries, positions, tile, vectors, key, stride, low, high, stop, scale, cap, window,
    GROUP: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """Go on with the running maximum score and sum of exponentials per query over the keys ``low..high``.

    Both passes must see the same scores. A sum of float32 products depends on the order of the operands: keys
    come first here because they do where weights are summed per key. Products of 16-bit numbers are exact;
    there queries come first, so that a sum over keys stays within a warp.
    """
    for start in tl.range(low, high, BLOCK):
        keys = load_keys(key, start, stop, stride, MASKED, D, PADDED, BLOCK)
        if UPCAST or queries.dtype == tl.float32:
            dots = tl.trans(dot(keys, tl.trans(queries), UPCAST))
        else:
            dots = dot(queries, tl.trans(keys), UPCAST)
        scores = softcapped(dots, scale, cap, SOFTCAP)
        if MASKED:
            at = load_positions(positions, tile, vectors, GROUP, VECTORS)
            column = (start + tl.arange(0, BLOCK))[None, :]
            seen = (column <= at[:, None]) & (column < stop)
            if WINDOW:
                seen = seen & (column > at[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = higher
        if MASKED:  # a query that has seen nothing yet
            base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = exponentials(top - base, scale, SOFTCAP)
        total = total * shrink + tl.sum(exponentials(scores - base[:, None], scale, SOFTCAP), 1)
        top = higher
    return top, total


@triton.jit
def cut_of_span(spans, span, cut, cuts, tokens, SPANS: tl.constexpr, BLOCK: tl.constexpr):
    """The keys of one cut of a span; cuts are whole blocks, the last ones may be empty."""
    start = 0
    stop = tokens
    if SPANS:
        start = tl.load(spans + 2 * span)
        stop = tl.load(spans + 2 * span + 1)
    length = tl.cdiv(tl.cdiv(stop - start, cuts), BLOCK) * BLOCK
    return tl.minimum(start + cut * length, stop), tl.minimum(start + (cut + 1) * length, stop)


@triton.jit
def _spread(
    sums, known, turned, positions, tile, vectors, base, key, stride, low, high, stop, scale, cap, window,
    GROUP: tl.constexpr, ADD: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr,
    UPCAST: tl.constexpr
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


@triton.jit(do_not_specialize=["cuts", "window", "tokens", "rows"])
def log_sums_kernel(
    query, key, positions, spans, out, scale, cap, window, cuts, tokens, rows, query_head, query_row,
    key_head, key_row, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    VECTORS: tl.constexpr, BLOCK: tl.constexpr, SPANS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """Per span, cut, row and head: the log-sum-exp of the scores of the cut's keys, as a score.

    Minus infinity where a row sees none of them; where one key has all the weight, its score to the bit.
    """
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    vectors = rows * GROUP
    if tile * VECTORS >= vectors:
        return
    start, stop = cut_of_span(spans, part // cuts, part % cuts, cuts, tokens, SPANS, BLOCK)
    queries, first, last = load_tile(
        query, positions, vectors, tile, kv_head, query_row, query_head, GROUP, D, PADDED, VECTORS
    )
    begin, clear, whole, end = ranges(start, stop, first, last, window, WINDOW, BLOCK)
    keys = key + kv_head.to(tl.int64) * key_head
    top = tl.full([VECTORS], float("-inf"), tl.float32)
    total = tl.zeros([VECTORS], tl.float32)
    if WINDOW:
        top, total = _gather(
            top, total, queries, positions, tile, vectors, keys, key_row, begin, tl.minimum(clear, end), stop,
            scale, cap, window, GROUP, True, WINDOW, SOFTCAP, D, PADDED, BLOCK, VECTORS, UPCAST,
        )  # fmt: skip
    top, total = _gather(
        top, total, queries, positions, tile, vectors, keys, key_row, clear, whole, stop, scale, cap,
        window, GROUP, False, WINDOW, SOFTCAP, D, PADDED, BLOCK, VECTORS, UPCAST,
    )  # fmt: skip
    top, total = _gather(
        top, total, queries, positions, tile, vectors, keys, key_row, whole, end, stop, scale, cap,
        window, GROUP, True, WINDOW, SOFTCAP, D, PADDED, BLOCK, VECTORS, UPCAST,
    )  # fmt: skip
    above = tl.log2(tl.maximum(total, 1e-30))
    if not SOFTCAP:
        above = above / scale
    row, head, inside = place_in_tile(tile, kv_head, vectors, GROUP, VECTORS)
    place = (part * rows + row).to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(out + place, tl.where(total > 0.0, top + above, top), mask=inside)


@triton.jit
def _add_tile(
    sums, known, query, positions, tile, vectors, kv_head, key, lse, start, stop, scale, cap, window,
    query_head, query_row, key_row, lse_head, lse_row, GROUP: tl.constexpr, D: tl.constexpr,
    PADDED: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """Add one tile's weights to the sums of the keys ``start..stop``."""
    queries, first, last = load_tile(
        query, positions, vectors, tile, kv_head, query_row, query_head, GROUP, D, PADDED, VECTORS
    )
    row, head, inside = place_in_tile(tile, kv_head, vectors, GROUP, VECTORS)
    place = row.to(tl.int64) * lse_row + head.to(tl.int64) * lse_head
    base = tl.load(lse + place, mask=inside, other=float("inf"))
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


@triton.jit(do_not_specialize=["cuts", "window", "tokens", "rows"])
def columns_kernel(
    query, key, positions, spans, lse, out, scale, cap, window, cuts, tokens, rows, query_head, query_row,
    key_head, key_row, lse_span, lse_head, lse_row, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr, SPANS: tl.constexpr,
    ONCE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """Sums of weights per key into ``out[slot, kv_head]``, zeros before; tiles are dealt to the slots.

    Programs that share keys are neighbours: the first of them brings the keys into the L2 cache.
    """
    slot, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = part // cuts
    start, stop = cut_of_span(spans, span, part % cuts, cuts, tokens, SPANS, BLOCK)
    vectors = rows * GROUP
    keys = key + kv_head.to(tl.int64) * key_head
    sums = out + (slot * KV_HEADS + kv_head).to(tl.int64) * tokens
    own = lse + span.to(tl.int64) * lse_span
    if ONCE:
        if slot * VECTORS < vectors:
            _add_tile(
                sums, 0, query, positions, slot, vectors, kv_head, keys, own, start, stop, scale, cap, window,
                query_head, query_row, key_row, lse_head, lse_row, GROUP, D, PADDED, VECTORS, BLOCK, False,
                WINDOW, SOFTCAP, UPCAST,
            )  # fmt: skip
    else:
        for tile in tl.range(slot, tl.cdiv(vectors, VECTORS), tl.num_programs(0), num_stages=1):
            known = tl.minimum(tile - slot, 1) * stop  # the first tile finds nothing to add to
            _add_tile(
                sums, known, query, positions, tile, vectors, kv_head, keys, own, start, stop, scale, cap,
                window, query_head, query_row, key_row, lse_head, lse_row, GROUP, D, PADDED, VECTORS, BLOCK,
                True, WINDOW, SOFTCAP, UPCAST,
            )  # fmt: skip
            tl.debug_barrier()  # the next tile reads what other threads of this program have stored
