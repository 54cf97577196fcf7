"""A tolerance per region of the questions, which follows a target recall of results."""

from __future__ import annotations

import math
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ragcachekit.background import Background
from ragcachekit.config import positive
from ragcachekit.query.base import ResultId
from ragcachekit.query.metrics import Float64

_STEPS = 32  # tolerances that are told apart, in equal steps up to the cache's
_ALL_OF_FIRST = 20  # hits of a region that are all checked
_SETTLING = 1000  # lookups of a partition that move its centroids
_FORGETTING = 1000  # lookups of a region after which the oldest quarter of its checks goes
_MOST_PARTITIONS = 1000
_MOST_WAITING = 64  # checks; what comes beyond is not checked


class RegionTolerance(NamedTuple):
    """A region's tolerance, and the mean recall of results of its last checked hits, NaN without any."""

    partition: Hashable
    region: int
    tolerance: float
    recall: float
    checks: int


class AdaptiveTolerance:
    """Tolerances of a :class:`CachedRetrieval`, at most that of its cache, by checked hits. Thread safe.

    A share of the hits on near questions is searched again in the background. Recall of results is the part
    of what the index finds that the hit returned too. Each region begins with the cache's tolerance and gets
    the largest one at which the mean recall of its last checks reaches the target. Old checks are forgotten,
    so a tolerance may rise again. Regions are cells around centroids of a partition's first questions.

    Results are compared by id, so searches must give real document ids.

    Parameters
    ----------
    target : float
        Recall of results to reach, in (0, 1].
    share : float
        Part of the hits to check, in (0, 1]; a region's first hits are all checked.
    regions : int
        Centroids per partition.
    memory : int
        Checks per region that count.
    seed : int
        Of the choice of hits. The same lookups and checks in the same order give the same tolerances.

    Raises
    ------
    ValueError, TypeError
        For bad settings.
    """

    def __init__(
        self, target: float = 0.95, share: float = 0.1, *, regions: int = 8, memory: int = 256, seed: int = 0
    ) -> None:
        for name, value in (("target", target), ("share", share)):
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
        self._target, self._share = target, share
        self._most, self._memory = positive("regions", regions), positive("memory", memory)
        self._partitions: OrderedDict[Hashable, _Cells] = OrderedDict()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._background = Background(_call, _MOST_WAITING, "ragcachekit-adaptive-tolerance")

    def tolerance(self, partition: Hashable, embedding: ArrayLike, most: float) -> float:
        """The tolerance of a lookup, between 0 and ``most``, which is that of the cache."""
        unit = _unit(embedding)
        with self._lock:
            cells = self._cells(partition, most)
            if not cells.fits(unit):
                return most  # the cache refuses it
            region = cells.regions[cells.nearest(unit, learn=True)]
            region.lookups += 1
            if not region.lookups % _FORGETTING:
                for _ in range(math.ceil(len(region.checks) / 4)):
                    region.checks.popleft()
                region.adjust(self._target)
            return most * region.limit / _STEPS

    def check(
        self,
        partition: Hashable,
        embedding: ArrayLike,
        distance: float,
        ids: Sequence[ResultId],
        search: Callable[[], Iterable[ResultId]],
    ) -> bool:
        """Maybe compare the ``ids`` of a hit at ``distance`` with those of ``search()``, in the background.

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
            step = min(_STEPS - 1, int(_STEPS * distance / cells.most)) if cells.most else 0
        return self._background.submit(partial(self._check, region, step, frozenset(ids), search))

    def report(self) -> list[RegionTolerance]:
        """The present tolerances of all regions."""
        with self._lock:
            return [
                RegionTolerance(
                    partition,
                    number,
                    cells.most * region.limit / _STEPS,
                    float(np.mean([recall for _, recall in region.checks])) if region.checks else math.nan,
                    len(region.checks),
                )
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
            cells = self._partitions[partition] = _Cells(self._most, self._memory)
            if len(self._partitions) > _MOST_PARTITIONS:
                self._partitions.popitem(last=False)
        cells.most = most
        return cells

    def _check(
        self, region: _Region, step: int, ids: frozenset[ResultId], search: Callable[[], Iterable[ResultId]]
    ) -> None:
        found = frozenset(search())
        with self._lock:
            region.checks.append((step, len(ids & found) / len(found) if found else 0.0))
            region.adjust(self._target)


class _Region:
    """Checked hits as ``(step, recall)``, and the number of steps within the tolerance."""

    def __init__(self, memory: int) -> None:
        self.checks: deque[tuple[int, float]] = deque(maxlen=memory)
        self.limit, self.hits, self.lookups = _STEPS, 0, 0

    def adjust(self, target: float) -> None:
        """Include all steps up to the last at which the mean recall exceeds the target by a margin."""
        sums = np.zeros((2, _STEPS))
        for step, recall in self.checks:
            sums[:, step] += recall, 1.0
        recalls, counts = sums.cumsum(axis=1)
        good = recalls >= target * counts + (1 - target) * np.sqrt(counts) - 1e-9
        self.limit = int(good.nonzero()[0][-1]) + 1 if good.any() else 0


class _Cells:
    """Centroids of a partition's questions (MacQueen's k-means), with a region around each."""

    def __init__(self, most_regions: int, memory: int) -> None:
        self._most_regions, self._memory = most_regions, memory
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
            self.regions.append(_Region(self._memory))
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
