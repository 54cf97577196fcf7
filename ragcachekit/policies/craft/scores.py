"""Cache-Craft's formulas (section 3.1, 3.2): how much a chunk's KV depends on its context.

Contexts are ids of segments in order; repeated ids (separators) are matched by their number of occurrence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch

NO_IMPACT = 0.5
"""CCI of KV without context: the logistic function of 0."""


@dataclass(frozen=True)
class Impact:
    """How much one entry's KV depends on its context.

    ``inter`` is the attention from the chunk to each segment of ``context``, summed over heads and rows, mean
    over layers; ``cci`` the cache context impact, 0.5 to 1.
    """

    context: tuple[str, ...] = ()
    inter: tuple[float, ...] = ()
    cci: float = NO_IMPACT

    @classmethod
    def of(cls, context: Sequence[str], sums: Mapping[str, torch.Tensor], tokens: int) -> Impact:
        """From the sums of an ``in-prompt`` entry of ``tokens`` tokens; others count as without context.

        ``sums`` has ``inter`` ``[layers, segments]``, ``intra`` ``[layers]`` and ``behind`` ``[segments]``
        (their lengths); see :class:`ragcachekit.model.kv.ChunkKV`.
        """
        if "inter" not in sums:
            return cls()
        inter, lengths = sums["inter"].double(), sums["behind"].double()
        outer = float((inter / lengths).sum(1).mean()) / tokens
        inner = float(sums["intra"].double().mean()) / tokens**2
        return cls(tuple(context), tuple(inter.mean(0).tolist()), context_impact(outer, inner))

    def overlap(self, before: Sequence[str]) -> float:
        """β': the share of that attention to segments in ``before``, reduced by disorder."""
        return prefix_overlap(self.context, self.inter, before) * (1 - order_penalty(self.context, before))

    def cost(self, before: Sequence[str]) -> float:
        """``CCI (1 - β')``, 0 to 1: the share to recompute at α = 1."""
        return self.cci * (1 - self.overlap(before))


def context_impact(outer: float, inner: float) -> float:
    """CCI = 1 / (1 + exp(-a/b)), paper eq. 11, of normalised inter (a) and intra (b) attention."""
    if inner <= 0:
        return 1.0 if outer > 0 else NO_IMPACT
    return 1 / (1 + math.exp(-outer / inner))


def prefix_overlap(old: Sequence[str], inter: Sequence[float], new: Sequence[str]) -> float:
    """β, paper eq. 6: the share of ``inter`` (one per old segment) that went to segments in ``new``."""
    if not old:
        return 0.0 if new else 1.0
    present = set(_numbered(new))
    total = math.fsum(inter)
    kept = math.fsum(a for id, a in zip(_numbered(old), inter, strict=True) if id in present)
    # If all attention went into a sink, segments count by number.
    return kept / total if total > 0 else len(present & set(_numbered(old))) / len(old)


def order_penalty(old: Sequence[str], new: Sequence[str]) -> float:
    """γ, paper eq. 7: the share of discordant pairs (Kendall) among the segments in both."""
    place = {id: at for at, id in enumerate(_numbered(new))}
    now = [place[id] for id in _numbered(old) if id in place]
    if len(now) < 2:
        return 0.0
    return sum(a > b for a, b in combinations(now, 2)) / math.comb(len(now), 2)


def fix_overhead(alpha: float, cost: float) -> float:
    """CFO, paper eq. 12: the share of a chunk's tokens to recompute."""
    return min(1.0, max(0.0, alpha * cost))


def focused(scores: Sequence[float]) -> frozenset[int]:
    """Indices of the chunks in the question's focus (paper algorithm 1, lines 4 to 9).

    Gaps between descending scores, as shares of their sum, have a running entropy; the cut is where it grows
    most. All chunks if there are fewer than three, or no gap.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    gaps = [scores[a] - scores[b] for a, b in pairwise(order)]
    total = math.fsum(gaps)
    if len(scores) < 3 or total <= 0:
        return frozenset(order)
    shares = [gap / total for gap in gaps]
    growth = [-p * math.log(p) if p > 0 else 0.0 for p in shares[1:]]  # h_{i+1} - h_i, i from 1
    return frozenset(order[: growth.index(max(growth)) + 1])


def _numbered(ids: Sequence[str]) -> list[tuple[str, int]]:
    """Each id with its number of earlier occurrences."""
    seen: Counter[str] = Counter()
    out = []
    for id in ids:
        out.append((id, seen[id]))
        seen[id] += 1
    return out
