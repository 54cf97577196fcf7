"""How long prefills take on this machine: measured once per process, used for eviction and for loading."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ragcachekit.model.kv import decoder_of
from ragcachekit.model.rope import lone_kv
from ragcachekit.model.snapshots import SnapshotLayout, run
from ragcachekit.threads import BackgroundWorker, JobQueue

NEEDED_AT = 0.25  # filled share of a cache from which on its entries' costs are measured
BUDGET_SECONDS = 1.5  # approximate time of a measurement; slow models are measured at fewer tokens

_CACHED = 256
_NEW = (16, 64, 256, 1024)
_REPEATS = 2

Point = tuple[int, int, float]
"""Cached tokens, new tokens, seconds."""


@dataclass(frozen=True)
class PrefillProfile:
    """Seconds of a prefill of ``new`` tokens after ``cached`` ones (RAGCache section 5.1, T(alpha, beta)).

    ``fixed + per_row * new + per_pair * new * (cached + new / 2)``: bilinear in both but for
    the attention among the new tokens. Coefficients are >= 0, and not all 0.
    """

    fixed: float
    per_row: float
    per_pair: float = 0.0

    @classmethod
    def fit(cls, points: Sequence[Point]) -> PrefillProfile:
        """The profile of measured points: least squares of relative errors, no coefficient below 0."""
        terms = np.array([[1.0, new, new * (cached + new / 2)] for cached, new, _ in points])
        terms /= np.array([seconds for *_, seconds in points])[:, None]
        used, coefficients = [0, 1, 2], np.zeros(3)
        while used:
            solution, *_ = np.linalg.lstsq(terms[:, used], np.ones(len(terms)), rcond=None)
            if (solution >= 0).all():
                coefficients[used] = solution
                break
            used.pop(int(solution.argmin()))
        return cls(*coefficients.tolist())

    def seconds(self, cached: float, new: float) -> float:
        """Estimated seconds of one prefill; 0 for no new tokens."""
        if not new:
            return 0.0
        return self.fixed + self.per_row * new + self.per_pair * new * (cached + new / 2)


@torch.no_grad()
def measure_profile(
    model: Any, *, context: int, budget: float = BUDGET_SECONDS, snapshots: SnapshotLayout | None = None
) -> PrefillProfile:
    """Time prefills of growing length, after nothing and after some of the ``context`` tokens.

    After the first lengths, a prefill starts only if it should end within ``budget`` seconds. ``snapshots``
    is the layout of a model that does not run on a plain cache.
    """
    started = time.perf_counter()
    cached = min(_CACHED, max(1, context // 2))
    timed = _after_one_token(model) if snapshots is None else _after_snapshot(model, snapshots, cached)
    timed(0, 4)  # the first forward of a size allocates
    points = [timed(after, 4) for after in (0, cached)]
    for new in (count for count in _NEW if count + cached < context):
        last = points[-1]
        expected = 2 * _REPEATS * last[2] * new / last[1]
        if len(points) > 2 and time.perf_counter() - started + expected > budget:
            break
        points += [timed(after, new) for after in (0, cached) for _ in range(_REPEATS)]
    return PrefillProfile.fit(points)


def _after_one_token(model: Any) -> Callable[[int, int], Point]:
    """Times one forward of new tokens after copies of one, until the device is done."""
    sample = lone_kv(model)

    def timed(cached: int, new: int) -> Point:
        cache = DynamicCache()
        for number, layer in enumerate(sample if cached else ()):
            kv = (side[None].expand(-1, -1, cached, -1).contiguous().to(model.device) for side in layer)
            cache.update(*kv, number)
        ids = torch.zeros(1, new, dtype=torch.long, device=model.device)
        started = time.perf_counter()
        out = decoder_of(model)(input_ids=ids, past_key_values=cache, use_cache=True)
        out[0][0, -1, 0].item()
        return cached, new, time.perf_counter() - started

    return timed


def _after_snapshot(model: Any, layout: SnapshotLayout, tokens: int) -> Callable[[int, int], Point]:
    """As :func:`_after_one_token`, after a snapshot of some ``tokens``."""
    ran = run(model, torch.zeros(1, tokens, dtype=torch.long, device=model.device))
    found = layout.captured(ran.cache, [(0, tokens)], tokens, state=True)

    def timed(cached: int, new: int) -> Point:
        cache = layout.restored(found) if cached else None
        ids = torch.zeros(1, cached + new, dtype=torch.long, device=model.device)
        started = time.perf_counter()
        run(model, ids, cached, layout.argument if cached else "", cache).logits[0, 0].item()
        return cached, new, time.perf_counter() - started

    return timed


class PrefillCost:
    """Costs of a model's prefills, for eviction and for loading; 0 (unknown) until they are measured.

    ``needed``: it is time to measure, as a share :data:`NEEDED_AT` of a cache is filled. ``context`` is the
    model's, in tokens; ``snapshots`` is as for :func:`measure_profile`.
    """

    def __init__(
        self,
        model: Any,
        *,
        context: int,
        background: BackgroundWorker,
        snapshots: SnapshotLayout | None = None,
    ) -> None:
        self._model, self._context, self._snapshots = model, context, snapshots
        self.profile: PrefillProfile | None = None
        self.needed = False
        self._filled, self._tried = 0.0, False
        self._jobs: JobQueue[None] = background.queue(lambda _: self.measure(), 1)

    def seconds(self, cached: int, new: int, share: float = 0.0) -> float:
        """Seconds of a prefill at the measured speed, or 0 if unknown.

        ``share`` is the part of a cache that the result takes.
        """
        if self.profile is None:
            self._filled += share
            self.needed = not self._tried and self._filled >= NEEDED_AT
            return 0.0
        return self.profile.seconds(cached, new)

    def measure(self) -> None:
        """Measure the profile, unless that was tried before."""
        if self.profile is None and not self._tried:
            self._tried, self.needed = True, False
            self.profile = measure_profile(self._model, context=self._context, snapshots=self._snapshots)

    def measure_later(self) -> None:
        """As :meth:`measure`, in the background."""
        if self.profile is None and not self._tried:
            self._jobs.add(None)
