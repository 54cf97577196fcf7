"""Race of candidates: questions in rounds, and no more of them for a candidate than its decision needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from ragcachekit.commands.bench.resample import Bootstrap
from ragcachekit.commands.calibrate.losses import Loss

ROUND = 8
"""Questions between two decisions, and the least number of them."""

CONFIDENCE = 0.9
"""Of the upper bound that is compared with a budget."""

OVER_CONFIDENCE = 0.95
"""Of the lower bound above which a candidate is dropped."""

Ask = Callable[[int, Sequence[str]], Iterable[Loss]]
"""Function giving what each of the named policies loses on a question, in their order."""

WITHIN, OVER, BEATEN, OPEN = "within", "over", "beaten", "not sure"


@dataclass
class Candidate:
    """A policy with its losses so far; ``over`` once its mean loss is surely above the budget."""

    policy: str
    losses: list[Loss] = field(default_factory=list)
    over: bool = False
    upper: float = np.inf

    def mean(self, what: str) -> float:
        """Mean of a field of :class:`Loss`."""
        return float(np.mean([getattr(loss, what) for loss in self.losses]))

    @property
    def cost(self) -> tuple[float, float]:
        """What the cheapest has least of."""
        return self.mean("ratio"), self.upper


class Bounds:
    """One-sided bounds of mean losses over questions ``[n]``, by percentile bootstrap."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = cache(lambda n: Bootstrap(n, seed))

    def upper(self, losses: ArrayLike, worst: float) -> float:
        """90 % upper bound, where one more question counts as lost by ``worst``.

        Without it, a sample would prove that losses too rare to be in it do not exist.
        """
        sample = np.append(losses, worst)
        return self._draw(len(sample)).upper_of_mean(sample, CONFIDENCE)

    def lower(self, losses: ArrayLike) -> float:
        """95 % lower bound."""
        sample = -np.asarray(losses, np.float64)
        return -self._draw(len(sample)).upper_of_mean(sample, OVER_CONFIDENCE)


def race(
    ask: Ask,
    policies: Sequence[str],
    order: Sequence[int],
    budget: float,
    bounds: Bounds,
    *,
    worst: float = 0.0,
    progress: bool = False,
) -> list[Candidate]:
    """Ask questions by number in this (random) ``order`` until the cheapest within ``budget`` is sure.

    After each round a candidate is dropped once it is surely over the budget, and rests while a cheaper one
    is within. The bound's added question counts the worst loss that was seen, at least ``worst``.
    """
    found = [Candidate(name) for name in policies]
    racing = list(found)
    with tqdm(total=len(order) * len(racing), desc="calibrate", unit="answer", disable=not progress) as bar:
        for start in range(0, len(order), ROUND):
            asked = order[start : start + ROUND]
            for at in asked:
                losses = ask(at, [one.policy for one in racing])
                for candidate, loss in zip(racing, losses, strict=True):
                    candidate.losses.append(loss)
                    worst = max(worst, loss.loss)
                    bar.update()
            for candidate in found:
                values = [loss.loss for loss in candidate.losses]
                candidate.upper = bounds.upper(values, worst)
                candidate.over |= bounds.lower(values) > budget
            racing = _racing(found, budget)
            left = len(order) - start - len(asked)
            if not racing or racing[0].upper <= budget:
                left = 0
            bar.total = bar.n + left * len(racing)
            bar.set_postfix(racing=len(racing))
            if not left:
                break
    return found


def _racing(found: Sequence[Candidate], budget: float) -> list[Candidate]:
    """Candidates that may still be the cheapest within the budget, the cheapest first."""
    racing = sorted((one for one in found if not one.over), key=lambda one: one.cost)
    for place, one in enumerate(racing):
        if one.upper <= budget:
            return racing[: place + 1]
    return racing


def decision(candidate: Candidate, found: Sequence[Candidate], budget: float) -> str:
    """Why a candidate is chosen or not."""
    if candidate.over:
        return OVER
    if candidate not in _racing(found, budget):
        return BEATEN
    return WITHIN if candidate.upper <= budget else OPEN
