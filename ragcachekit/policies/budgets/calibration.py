"""Stored calibrations, and the policies that quality budgets stand for."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragcachekit.files import parse_json, read_regular, replace_file
from ragcachekit.policies.auto import Auto
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.budgets.budget import Budget
from ragcachekit.policies.registry import open_policy

log = logging.getLogger(__name__)

SCHEMA = 2
FULL = "full"

_TODO = "every prompt is computed in full; `ragcachekit calibrate` finds what it stands for"


@dataclass(frozen=True)
class CurvePoint:
    """A measured candidate."""

    policy: str
    ratio: float  # recomputed / cached rows, mean over the questions
    loss: float  # against full, mean
    upper: float  # one-sided 90 % upper bound of that mean
    n: int  # questions that it was asked


@dataclass(frozen=True)
class Calibration:
    """Result of ``ragcachekit calibrate`` for one model, namespace and encoder."""

    fingerprint: str
    namespace: str
    encoder: str
    quality: str  # what losses are in: kl (nats per token of the answer), ...
    budget: float  # that the race was about
    curve: tuple[CurvePoint, ...]  # all candidates by ratio; full is the last
    n: int  # questions asked
    sample: str  # questions, or probes made from a corpus
    seed: int  # of probes and bootstrap
    versions: dict[str, str]
    date: str  # ISO 8601, UTC

    def cheapest(self, loss: float) -> CurvePoint:
        """The candidate of least ratio whose upper bound is within ``loss``; ValueError without ``full``."""
        within = [point for point in self.curve if point.upper <= loss or point.policy == FULL]
        if not any(point.policy == FULL for point in within):
            raise ValueError("a calibration curve holds 'full', which loses nothing")
        return min(within, key=lambda point: (point.ratio, point.upper))


def record_path(folder: Path, fingerprint: str, namespace: str) -> Path:
    """File of the record of a model and a namespace."""
    name = hashlib.sha256(f"{fingerprint}\0{namespace}".encode()).hexdigest()
    return folder / "calibrations" / f"{name}.json"


def write_record(folder: Path, record: Calibration) -> Path:
    """Store a record, atomically and with mode 0600; OSError if the folder cannot be written."""
    path = record_path(folder, record.fingerprint, record.namespace)
    replace_file(path, json.dumps({"schema": SCHEMA, **asdict(record)}, indent=1))
    return path


def read_record(folder: Path, fingerprint: str, namespace: str) -> Calibration | None:
    """The stored record, or None; an invalid one counts as none, with a logged warning."""
    path = record_path(folder, fingerprint, namespace)
    try:
        record = _parsed(parse_json(read_regular(path, own=True)))
        if (record.fingerprint, record.namespace) != (fingerprint, namespace):
            raise ValueError("it is about another model or namespace")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("the calibration record %s is not used: %s", path, error)
        return None
    return record


def _parsed(found: Any) -> Calibration:
    if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
        raise ValueError(f"it is no calibration record of schema {SCHEMA}")
    curve = tuple(CurvePoint(**point) for point in found.pop("curve", ()))
    record = Calibration(**found, curve=curve)
    if not all(math.isfinite(point.ratio + point.upper) for point in curve):
        raise ValueError("its curve is not finite")
    for name in (point.policy for point in curve):
        policy = open_policy(name)
        if isinstance(policy, Budget | Auto) or policy.encoder not in (None, record.encoder):
            raise ValueError(f"{name} is no policy that chunks encoded {record.encoder} can have")
    record.cheapest(record.budget)
    return record


@dataclass(frozen=True, eq=False)
class Chosen:
    """The concrete policy of a request, with its name in the report (``budget:0.05 -> lego:4``).

    ``fallback`` is the reason for a prefill in full, if any.
    """

    policy: SelectionPolicy
    label: str
    notes: tuple[str, ...] = ()
    fallback: str | None = None


class Budgets:
    """Calibrated policies of one model and encoder, from records in the cache ``folder``.

    A namespace's record is read once: a new calibration applies to objects made afterwards.
    """

    def __init__(self, folder: Path, fingerprint: str, encoder: str) -> None:
        self._folder, self._fingerprint, self._encoder = folder, fingerprint, encoder
        self._lock = threading.Lock()
        self._records: dict[str, Calibration | None] = {}
        self._chosen: dict[tuple[str, float], Chosen] = {}

    def resolve(self, policy: SelectionPolicy, namespace: str) -> Chosen:
        """The concrete policy: that of the record, or ``full`` with one logged warning per budget.

        Anything but a :class:`Budget` is returned as it is.
        """
        if not isinstance(policy, Budget):
            return Chosen(policy, policy.name)
        at = namespace, policy.loss
        with self._lock:
            if at not in self._chosen:
                self._chosen[at] = self._resolve(policy, namespace)
            return self._chosen[at]

    def record(self, namespace: str) -> Calibration | None:
        """The namespace's record, if there is one."""
        with self._lock:
            return self._record(namespace)

    def _record(self, namespace: str) -> Calibration | None:
        if namespace not in self._records:
            self._records[namespace] = read_record(self._folder, self._fingerprint, namespace)
        return self._records[namespace]

    def _resolve(self, budget: Budget, namespace: str) -> Chosen:
        record = self._record(namespace)
        found, why = FULL, None
        if record is None:
            why = f"it is not calibrated for this model and namespace {namespace!r}"
        elif record.encoder != self._encoder:
            why = f"it was calibrated for the encoder {record.encoder}, and this one is {self._encoder}"
        elif (found := record.cheapest(budget.loss).policy) == FULL:
            why = f"no candidate calibrated on {record.n} questions ({record.quality}) is surely within it"
        if why is not None:
            log.warning("%s: %s; %s", budget.name, why, _TODO)
        notes = (f"{budget.name}: {why}",) if why is not None else ()
        return Chosen(open_policy(found), f"{budget.name} -> {found}", notes)
