"""How an answer over reused chunks is compared with that of a full prefill."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Comparison:
    """What one request gave beside full; ``agreed`` and ``f1`` are None where answers were not compared."""

    kl: float
    agreed: bool | None = None
    f1: float | None = None


class Tally:
    """The comparisons of one namespace; ``recent`` says of the last ones whether they differed."""

    def __init__(self, window: int) -> None:
        self.recent: deque[bool] = deque(maxlen=window)
        self.counts: Counter[str] = Counter()
        self.kl_sum = self.kl_max = self.f1_sum = 0.0
        self.warned = False
        self.fallback: str | None = None

    def add(self, found: Comparison) -> None:
        """Count one more."""
        self.counts["shadowed"] += 1
        self.kl_sum += found.kl
        self.kl_max = max(self.kl_max, found.kl)
        if found.agreed is not None and found.f1 is not None:
            self.counts["compared"] += 1
            self.counts["agreed"] += found.agreed
            self.f1_sum += found.f1
            self.recent.append(not found.agreed)


def divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL(full || other) in nats of two distributions, given as log probabilities ``[vocab]``."""
    terms = torch.where(full.isneginf(), 0.0, full.exp() * (full - other))
    return max(0.0, float(terms.sum()))


def token_f1(answer: Sequence[int], full: Sequence[int]) -> float:
    """Harmonic mean of precision and recall of token ids, as a bag; two empty answers agree."""
    if not answer or not full:
        return float(len(answer) == len(full))
    common = (Counter(answer) & Counter(full)).total()
    return 2 * common / (len(answer) + len(full))
