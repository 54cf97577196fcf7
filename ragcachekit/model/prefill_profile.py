"""How long prefills take on this machine: measured once per model, used for eviction and for loading."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from ragcachekit.files import parse_json, read_regular, replace_file
from ragcachekit.model.kv import one_token_cache

log = logging.getLogger(__name__)

SCHEMA = 2
MAX_DRIFT = 16.0  # largest factor by which observations scale the estimates, up or down
BUDGET_SECONDS = 1.5  # approximate time of a measurement; slow models are measured at fewer tokens
NEEDED_AT = 0.25  # filled share of a cache from which on its entries' costs are measured

_CACHED = 256
_NEW = (16, 64, 256, 1024)
_REPEATS = 2
_SMOOTHING = 0.1

Point = tuple[int, int, float]
"""Cached tokens, new tokens, seconds."""


@dataclass
class PrefillProfile:
    """Seconds of a prefill of ``new`` tokens after ``cached`` ones (RAGCache section 5.1, T(alpha, beta)).

    ``fixed + per_row * new + per_pair * new * (cached + new / 2)``, times ``scale``: bilinear in both but for
    the attention among the new tokens. ValueError for coefficients below 0 or without any time.
    """

    fixed: float
    per_row: float
    per_pair: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        numbers = (self.fixed, self.per_row, self.per_pair, self.scale)
        if not all(0 <= number < math.inf for number in numbers) or not (self.scale and any(numbers[:3])):
            raise ValueError(f"the coefficients of a profile must be numbers >= 0, not all 0, got {numbers}")

    @classmethod
    def fit(cls, points: Sequence[Point]) -> PrefillProfile:
        """The profile of measured points: least squares of relative errors, no coefficient below 0."""
        terms = np.array([[1.0, new, new * (cached + new / 2)] for cached, new, _ in points])
        terms /= np.array([seconds for *_, seconds in points])[:, None]
        return cls(*_never_negative(terms).tolist())

    def seconds(self, cached: float, new: float) -> float:
        """Estimated seconds of one prefill; 0 for no new tokens, ValueError for negative counts."""
        if cached < 0 or new < 0:
            raise ValueError(f"token counts must be >= 0, got {cached} cached and {new} new")
        if not new:
            return 0.0
        return self.scale * (self.fixed + self.per_row * new + self.per_pair * new * (cached + new / 2))

    def observed(self, cached: float, new: float, seconds: float) -> None:
        """Scale the estimates slowly towards an observed time, by at most :data:`MAX_DRIFT`.

        ValueError if no token was new or the time is not a positive number.
        """
        if new <= 0 or cached < 0 or not 0 < seconds < math.inf:
            raise ValueError(f"no prefill takes {seconds} s for {new} new tokens after {cached}")
        expected = self.seconds(cached, new) / self.scale
        ratio = min(max(seconds / expected, 1 / MAX_DRIFT), MAX_DRIFT)
        self.scale = math.exp((1 - _SMOOTHING) * math.log(self.scale) + _SMOOTHING * math.log(ratio))

    def to_json(self) -> str:
        """The coefficients as JSON."""
        return json.dumps({"schema": SCHEMA, **vars(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> PrefillProfile:
        """Profile from the text of :meth:`to_json`; ValueError for any other text."""
        found: Any = parse_json(text)
        if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
            raise ValueError(f"this is no prefill profile of schema {SCHEMA}; measure it again")
        try:
            return cls(**found)
        except TypeError as error:
            raise ValueError(f"a damaged prefill profile ({error!r}); measure it again") from error


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


@torch.no_grad()
def measure_profile(model: Any, *, context: int, budget: float = BUDGET_SECONDS) -> PrefillProfile:
    """Time prefills of growing length, after nothing and after some of the ``context`` tokens.

    After the first lengths, a prefill starts only if it should end within ``budget`` seconds.
    """
    started = time.perf_counter()
    cached = min(_CACHED, max(1, context // 2))
    sample = one_token_cache(model)
    _timed(model, sample, 0, 4)  # the first forward of a size allocates
    points = [_timed(model, sample, after, 4) for after in (0, cached)]
    for new in (count for count in _NEW if count + cached < context):
        last = points[-1]
        expected = 2 * _REPEATS * last[2] * new / last[1]
        if len(points) > 2 and time.perf_counter() - started + expected > budget:
            break
        points += [_timed(model, sample, after, new) for after in (0, cached) for _ in range(_REPEATS)]
    return PrefillProfile.fit(points)


def _timed(model: Any, sample: DynamicCache, cached: int, new: int) -> Point:
    """Time one forward of ``new`` tokens after ``cached`` ones, until the device is done."""
    cache = DynamicCache()
    for number, layer in enumerate(sample.layers if cached else ()):
        kv = (t[:, :, :1].expand(-1, -1, cached, -1).contiguous() for t in (layer.keys, layer.values))
        cache.update(*kv, number)
    ids = torch.zeros(1, new, dtype=torch.long, device=model.device)
    started = time.perf_counter()
    out = model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    out[0][0, -1, 0].item()
    return cached, new, time.perf_counter() - started


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


def _file(folder: Path, fingerprint: str, model: Any) -> Path:
    device = model.device
    speed = [platform.node(), platform.machine(), str(device), torch.__version__]
    speed += [torch.cuda.get_device_name(device)] if device.type == "cuda" else [str(torch.get_num_threads())]
    name = hashlib.sha256(json.dumps([fingerprint, *speed]).encode()).hexdigest()[:32]
    return folder / "prefill" / f"{name}.json"


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
