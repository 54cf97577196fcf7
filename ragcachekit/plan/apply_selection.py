"""Rows and report of a plan, once it is known which cached rows are recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ragcachekit.plan.link_plan import COMPUTED, LinkPlan, chunks_of
from ragcachekit.policies.base import PlacedChunk

RECOMPUTED = "the policy recomputed all that was cached"

Flags = npt.NDArray[np.bool_]  # one per token of a prompt


def apply_selection(
    plan: LinkPlan, chosen: Iterable[int], per_layer: Sequence[int] | None = None, layers: int = 1
) -> LinkPlan:
    """The plan with these cached positions recomputed, and its report.

    ``per_layer`` is the number of cached rows that each of the ``layers`` layers recomputed, if it differs
    from the number chosen. ValueError for positions outside the cached chunks.
    """
    # One flag per token: sets of tens of thousands of positions take longer than a GPU's whole forward.
    length, placed = len(plan.token_ids), plan.placed
    cached, exact = _spread(placed, length), _spread([c for c in placed if c.is_exact], length)
    picked = np.zeros(length, dtype=bool)
    positions = np.fromiter(chosen, dtype=np.int64)
    outside = positions.size and not (positions.min() >= 0 and positions.max() < length)
    if not outside:
        picked[positions] = True
    if outside or (picked & ~cached).any():
        raise ValueError(f"policy {plan.report.policy} chose positions outside the cached chunks")
    # The last row gives the next token's logits: it is always computed.
    picked[-1:] = cached[-1:]
    kept, total = cached & ~picked, int(cached.sum())
    recomputed = int(picked.sum())
    spent = sum(per_layer) / layers if per_layer is not None else recomputed
    report = replace(
        plan.report,
        exact_tokens=int((kept & exact).sum()),
        approximate_tokens=int((kept & ~exact).sum()),
        recomputed_tokens=recomputed,
        computed_tokens=length - total,
        recompute_ratio=spent / total if total else 0.0,
        miss_reason="" if kept.any() else RECOMPUTED if placed else plan.report.miss_reason,
    )
    remaining = iter(placed)
    uses = tuple(
        use
        if use.source == COMPUTED
        else replace(
            use, recomputed=int(sum(picked[c.start : c.stop].sum() for c in chunks_of(use, remaining)))
        )
        for use in plan.report.uses
    )
    has_prefix = plan.report.prefix is not None
    report = replace(report, prefix=uses[0] if has_prefix else None, chunks=uses[has_prefix:])
    return replace(plan, rows=tuple(np.flatnonzero(~kept).tolist()), report=report, policy=None)


def _spread(chunks: Iterable[PlacedChunk], length: int) -> Flags:
    out = np.zeros(length, dtype=bool)
    for chunk in chunks:
        out[chunk.start : chunk.stop] = True
    return out
