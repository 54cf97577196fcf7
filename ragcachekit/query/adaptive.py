"""A tolerance per region of the questions, which follows a target recall of results."""

from __future__ import annotations

import math
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ragcachekit.background import BackgroundWorker
from ragcachekit.config import positive
from ragcachekit.query.base import ResultId
from ragcachekit.query.metrics import Float64

_ALL_OF_FIRST = 20  # hits of a region that are all checked
_RATE = 1.0  # how far one check moves a tolerance, on a logarithmic scale
_SAFETY = 0.5  # of the way from the target to 1: what is aimed at, as single checks are noisy
_LEAST = 2.0**-10  # of the cache's tolerance
_IDLE = 1000  # lookups of a region without a check after which its tolerance doubles
_SETTLING = 1000  # lookups of a partition that move its centroids
_MOST_PARTITIONS = 1000
_MOST_WAITING = 64  # checks; what comes beyond is not checked


class RegionTolerance(NamedTuple):
    """A region's tolerance, and the mean recall of results of its checked hits, 0 without any."""

    partition: Hashable
    region: int
    tolerance: float
    recall: float
    checks: int


class AdaptiveTolerance:
    """Tolerances of a :class:`CachedRetrieval`, at most that of its cache, by checked hits. Thread safe.

    A share of the hits on near questions is searched again in the background. Recall of results is the part
    of what the index finds that the hit returned too. A check below the target shrinks the tolerance of its
    region, one above it widens it, in proportion to the difference: so the mean recall approaches the target
    wherever the tolerance is not at its bound (as in adaptive conformal inference, Gibbs and Candès 2021).
    Each region begins with the cache's tolerance. Regions are cells around centroids of a partition's first
    questions.

    Results are compared by id, so searches must give real document ids.

    Parameters
    ----------
    target : float
        Recall of results to reach, in (0, 1].
    share : float
        Part of the hits to check, in (0, 1]; a region's first hits are all checked.
    regions : int
        Centroids per partition.
    seed : int
        Of the choice of hits. The same lookups and checks in the same order give the same tolerances.

    Raises
    ------
    ValueError, TypeError
        For bad settings.
    """

    def __init__(self, target: float = 0.95, share: float = 0.1, *, regions: int = 8, seed: int = 0) -> None:
        for name, value in (("target", target), ("share", share)):
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
        self._aim, self._share = target + _SAFETY * (1 - target), share
        self._most = positive("regions", regions)
        self._partitions: OrderedDict[Hashable, _Cells] = OrderedDict()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._background = BackgroundWorker()
        self._jobs = self._background.queue(_call, _MOST_WAITING)

    def tolerance(self, partition: Hashable, embedding: ArrayLike, most: float) -> float:
        """The tolerance of a lookup, between 0 and ``most``, which is that of the cache."""
        unit = _unit(embedding)
        with self._lock:
            cells = self._cells(partition, most)
            if not cells.fits(unit):
                return most  # the cache refuses it
            region = cells.regions[cells.nearest(unit, learn=True)]
            region.idle += 1
            if region.idle >= _IDLE:
                region.idle, region.part = 0, min(1.0, 2 * region.part)
            return most * region.part

    def check(
        self,
        partition: Hashable,
        embedding: ArrayLike,
        ids: Sequence[ResultId],
        search: Callable[[], Iterable[ResultId]],
    ) -> bool:
        """Maybe compare the ``ids`` of a hit with those of ``search()``, in the background.

        Returns whether a check was queued. An error of the search is logged.
        """
        with self._lock:
            cells = self._partitions.get(partition)
            if cells is None or not cells.regions:
                return False
            region = cells.regions[cells.nearest(_unit(embedding), learn=False)]
            region.hits += 1
            if region.hits > _ALL_OF_FIRST and self._random.random() >= self._share:
                return False
        return self._jobs.submit(partial(self._check, region, frozenset(ids), search))

    def report(self) -> list[RegionTolerance]:
        """The present tolerances of all regions."""
        with self._lock:
            return [
                RegionTolerance(partition, number, cells.most * region.part, region.recall, region.checks)
                for partition, cells in self._partitions.items()
                for number, region in enumerate(cells.regions)
            ]

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all queued checks are done; False if ``timeout`` seconds did not suffice."""
        return self._background.flush(timeout)

    def close(self) -> None:
        """Drop the queued checks and wait for the running one."""
        self._background.close()

    def _cells(self, partition: Hashable, most: float) -> _Cells:
        cells = self._partitions.get(partition)
        if cells is None:
            cells = self._partitions[partition] = _Cells(self._most)
            if len(self._partitions) > _MOST_PARTITIONS:
                self._partitions.popitem(last=False)
        cells.most = most
        return cells

    def _check(
        self, region: _Region, ids: frozenset[ResultId], search: Callable[[], Iterable[ResultId]]
    ) -> None:
        found = frozenset(search())
        recall = len(ids & found) / len(found) if found else 0.0
        with self._lock:
            region.checks += 1
            region.recall += (recall - region.recall) / region.checks
            region.idle = 0
            region.part = min(1.0, max(_LEAST, region.part * math.exp(_RATE * (recall - self._aim))))


@dataclass
class _Region:
    """A tolerance as part of the cache's, and what was counted of the region."""

    part: float = 1.0
    recall: float = 0.0
    checks: int = 0
    hits: int = 0
    idle: int = 0


class _Cells:
    """Centroids of a partition's questions (MacQueen's k-means), with a region around each."""

    def __init__(self, most_regions: int) -> None:
        self._most_regions = most_regions
        self._centroids: list[Float64] = []
        self._weights: list[int] = []
        self.regions: list[_Region] = []
        self.most = 0.0

    def fits(self, unit: Float64) -> bool:
        """Whether the vector is usable, and as wide as those before."""
        shape = self._centroids[0].shape if self._centroids else (unit.size,)
        return unit.shape == shape and bool(np.isfinite(unit).all())

    def nearest(self, unit: Float64, *, learn: bool) -> int:
        """The number of the region; with ``learn``, its centroid moves while it is new."""
        room = learn and len(self._centroids) < self._most_regions
        if room and not any(np.array_equal(unit, one) for one in self._centroids):
            self._centroids.append(unit.copy())
            self._weights.append(0)
            self.regions.append(_Region())
        gaps = np.stack(self._centroids) - unit
        at = int(np.einsum("ij,ij->i", gaps, gaps).argmin())
        if learn and sum(self._weights) < _SETTLING:
            self._weights[at] += 1
            self._centroids[at] += (unit - self._centroids[at]) / (self._weights[at] + 1)
        return at


def _unit(embedding: ArrayLike) -> Float64:
    vector = np.asarray(embedding, np.float64)
    length = float(np.linalg.norm(vector))
    return vector / length if length > 0 and math.isfinite(length) else vector


def _call(job: Callable[[], object]) -> None:
    job()
