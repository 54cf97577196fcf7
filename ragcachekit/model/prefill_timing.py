"""Measurement of prefill times on this machine, once per model."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from ragcachekit.files import read_regular, replace_file
from ragcachekit.model.layout import one_token_cache
from ragcachekit.model.prefill_profile import CACHED_GRID, NEW_GRID, PrefillProfile

log = logging.getLogger(__name__)

BUDGET_SECONDS = 1.5  # approximate time of a measurement; slow models are measured at fewer tokens

NEEDED_AT = 0.25  # filled share of a cache from which on its entries' costs are measured

CACHED = 256
NEW = (16, 64, 256, 1024)
REPEATS = 2

Point = tuple[int, int, float]  # cached tokens, new tokens, seconds


@torch.no_grad()
def measure_profile(model: Any, *, context: int, budget: float = BUDGET_SECONDS) -> PrefillProfile:
    """Time prefills of growing length, behind nothing and behind some of the ``context`` tokens.

    After the first lengths, a prefill begins only if it should end within ``budget`` seconds.
    """
    begun = time.perf_counter()
    cached = min(CACHED, max(1, context // 2))
    sample = one_token_cache(model)
    _timed(model, sample, 0, 4)  # the first forward of a size allocates
    points = [_timed(model, sample, behind, 4) for behind in (0, cached)]
    for new in (count for count in NEW if count + cached < context):
        last = points[-1]
        expected = 2 * REPEATS * last[2] * new / last[1]
        if len(points) > 2 and time.perf_counter() - begun + expected > budget:
            break
        points += [_timed(model, sample, behind, new) for behind in (0, cached) for _ in range(REPEATS)]
    return extended(points)


def extended(points: Sequence[Point]) -> PrefillProfile:
    """Profile of measured points (medians of repeated ones), extended to the whole grid by a fitted cost.

    The cost is ``fixed + per_row * new + per_pair * new * (cached + new / 2)``, each coefficient >= 0, points
    weighted by the inverse of their time.
    """
    measured: dict[tuple[int, int], list[float]] = {}
    for cached, new, seconds in points:
        measured.setdefault((cached, new), []).append(seconds)
    rows = sorted({cached for cached, _ in measured} | set(CACHED_GRID))
    columns = sorted({new for _, new in measured} | set(NEW_GRID))
    times = np.array([seconds for *_, seconds in points])
    coefficients = _never_negative(_costs([point[:2] for point in points]) / times[:, None])
    lacking = [cell for cell in itertools.product(rows, columns) if cell not in measured]
    guesses = np.maximum(_costs(lacking) @ coefficients, 1e-9)
    table = dict(zip(lacking, guesses.tolist(), strict=True))
    table |= {cell: float(np.median(found)) for cell, found in measured.items()}
    return PrefillProfile(rows, columns, [[table[c, n] for n in columns] for c in rows])


def _never_negative(relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of ``relative @ coefficients = 1`` over coefficients >= 0, by column subsets."""
    best, least = np.zeros(3), np.inf
    for chosen in itertools.product((False, True), repeat=3):
        columns = np.flatnonzero(chosen)
        solution, *_ = np.linalg.lstsq(relative[:, columns], np.ones(len(relative)), rcond=None)
        residual = float(np.square(relative[:, columns] @ solution - 1).sum())
        if (solution >= 0).all() and residual < least:
            best, least = np.zeros(3), residual
            best[columns] = solution
    return best


def _costs(cells: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    return np.array([[1.0, new, new * (cached + new / 2)] for cached, new in cells])


def stored_profile(folder: Path, fingerprint: str, model: Any) -> PrefillProfile | None:
    """Profile measured earlier on this machine for this model, or None."""
    try:
        return PrefillProfile.from_json(read_regular(_file(folder, fingerprint, model)))
    except (OSError, ValueError):
        return None


def store_profile(folder: Path, fingerprint: str, model: Any, profile: PrefillProfile) -> None:
    """Write the profile; a folder that cannot be written is logged."""
    try:
        replace_file(_file(folder, fingerprint, model), profile.to_json())
    except OSError as error:
        log.warning("could not keep how long prefills take: %s", error)


class PrefillCost:
    """Costs of a model's prefills on this machine, for eviction; 0 (unknown) until they are measured.

    They are needed once a share :data:`NEEDED_AT` of a cache is filled. Profiles are stored in ``folder``.
    ``context`` is the model's, in tokens.
    """

    def __init__(self, model: Any, *, fingerprint: str, folder: Path, context: int) -> None:
        self._model, self._fingerprint = model, fingerprint
        self._folder, self._context = folder, context
        self.profile = stored_profile(folder, fingerprint, model)
        self._filled = 0.0
        self._tried = False

    def seconds(self, cached: int, new: int, share: float = 0.0) -> float:
        """Seconds of a prefill at the measured speed, or 0 if unknown.

        ``share`` is the part of a cache that the result takes.
        """
        if self.profile is None:
            self._filled += share
            return 0.0
        # Without the current scale: entries are compared that came at other times.
        return self.profile.seconds(cached, new) / self.profile.scale

    @property
    def needed(self) -> bool:
        """Whether it is time to :meth:`measure`."""
        return self.profile is None and not self._tried and self._filled >= NEEDED_AT

    def measure(self) -> None:
        """Measure and store the profile, unless that was tried before."""
        if self.profile is not None or self._tried:
            return
        self._tried = True
        profile = measure_profile(self._model, context=self._context)
        store_profile(self._folder, self._fingerprint, self._model, profile)
        self.profile = profile


def _file(folder: Path, fingerprint: str, model: Any) -> Path:
    device = model.device
    speed = [platform.node(), platform.machine(), str(device), torch.__version__]
    speed += [torch.cuda.get_device_name(device)] if device.type == "cuda" else [str(torch.get_num_threads())]
    name = hashlib.sha256(json.dumps([fingerprint, *speed]).encode()).hexdigest()[:32]
    return folder / "prefill" / f"{name}.json"


def _timed(model: Any, sample: DynamicCache, cached: int, new: int) -> Point:
    """Time one forward of ``new`` tokens behind ``cached`` ones, until the device is done."""
    cache = DynamicCache()
    for number, layer in enumerate(sample.layers if cached else ()):
        kv = (t[:, :, :1].expand(-1, -1, cached, -1).contiguous() for t in (layer.keys, layer.values))
        cache.update(*kv, number)
    ids = torch.zeros(1, new, dtype=torch.long, device=model.device)
    begun = time.perf_counter()
    out = model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    out[0][0, -1, 0].item()
    return cached, new, time.perf_counter() - begun
