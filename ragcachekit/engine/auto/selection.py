"""Which candidates stay in the check of ``auto``, and which one is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ragcachekit.policies.auto import CANDIDATES, MOST_RATIO, Pair

WORSE = 2.0
"""A candidate with more than this multiple of the least KL is dropped."""

LEAST_PROMPTS = 3
"""Prompts before a candidate is dropped for its KL."""

NEAR = 1.05
"""Candidates within this multiple of the least KL count as equally good."""

NEGLIGIBLE = 0.001
"""Differences of mean KL, in nats per token, that no answer shows."""


class Measured(NamedTuple):
    """KL per answer token in nats, and recomputed / cached rows, of one candidate in one prompt."""

    kl: float
    ratio: float


Results = Mapping[Pair, Sequence[Measured]]
"""Per candidate, its prompts in order; candidates that were dropped have fewer."""


def means(measured: Sequence[Measured]) -> Measured:
    """The mean KL and ratio; NaN without prompts."""
    kl, ratio = np.mean(measured, axis=0).tolist() if measured else (math.nan, math.nan)
    return Measured(kl, ratio)


def contenders(results: Results) -> list[Pair]:
    """Candidates that took part in every prompt and may still be chosen; all of them before the first."""
    most = max(map(len, results.values()))
    left = {pair: means(found) for pair, found in results.items() if len(found) == most}
    if not most:
        return list(left)
    cheap = {pair: mean for pair, mean in left.items() if mean.ratio <= MOST_RATIO} or left
    if most < LEAST_PROMPTS:
        return list(cheap)
    least = min(mean.kl for mean in cheap.values())
    return [pair for pair, mean in cheap.items() if mean.kl <= max(WORSE * least, least + NEGLIGIBLE)]


def choice(results: Results) -> Pair:
    """The cheapest of the contenders that are as good as the one with the least mean KL.

    As good: within 5 %, 0.001 nats, or one standard error of the mean difference, paired by prompt. Cheapest:
    fewest recomputed rows in whole percent, then the encoder that :data:`CANDIDATES` names first.
    """
    pairs = contenders(results)
    mean = {pair: means(results[pair]) for pair in pairs}
    best = min(pairs, key=lambda pair: mean[pair].kl)
    encoders = [encoder for encoder, _ in CANDIDATES]

    def cost(pair: Pair) -> tuple[float, int, float]:
        at = encoders.index(pair[0]) if pair[0] in encoders else len(encoders)
        return round(mean[pair].ratio, 2), at, mean[pair].kl

    return min((pair for pair in pairs if _as_good(results[pair], results[best])), key=cost)


def _as_good(found: Sequence[Measured], best: Sequence[Measured]) -> bool:
    worse = np.array([one.kl - other.kl for one, other in zip(found, best, strict=True)])
    error = worse.std(ddof=1) / math.sqrt(len(worse)) if len(worse) > 1 else 0.0
    return bool(worse.mean() <= max(error, (NEAR - 1) * means(best).kl, NEGLIGIBLE))
