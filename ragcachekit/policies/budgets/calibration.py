"""The stored calibration record of a model and a corpus."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ragcachekit.files import parse_json, read_regular, replace_file
from ragcachekit.policies.budgets.budget import Budget
from ragcachekit.policies.registry import open_policy

log = logging.getLogger(__name__)

SCHEMA = 1
FULL = "full"


@dataclass(frozen=True)
class CurvePoint:
    """A measured candidate."""

    policy: str
    ratio: float  # recomputed / cached rows, mean over the questions
    f1: float  # mean
    loss: float  # mean F1 of full minus f1, paired by question
    doubt: float  # probability lost by the first token of full's answer, mean
    upper: float  # the higher of the one-sided 90 % upper bounds of loss and doubt


@dataclass(frozen=True)
class Calibration:
    """Result of ``ragcachekit calibrate`` for one model, namespace and encoder."""

    fingerprint: str
    namespace: str
    encoder: str
    budget: float
    policy: str  # the cheapest candidate within the budget
    ratio: float  # of that candidate
    curve: tuple[CurvePoint, ...]  # all candidates by ratio; full is the last
    n: int  # questions
    quality: str  # answers (F1 against right answers) or agreement (generated probes, full's answer)
    seed: int  # of probes and bootstrap
    versions: dict[str, str]
    date: str  # ISO 8601, UTC

    def cheapest(self, loss: float) -> CurvePoint:
        """As :func:`cheapest`, of this curve."""
        return cheapest(self.curve, loss)


def cheapest(curve: Sequence[CurvePoint], loss: float) -> CurvePoint:
    """The candidate of least ratio whose upper bound is within ``loss``; ValueError without ``full``."""
    within = [point for point in curve if point.upper <= loss or point.policy == FULL]
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
    if not isinstance(found, Mapping) or found.get("schema") != SCHEMA:
        raise ValueError(f"it is no calibration record of schema {SCHEMA}")
    if not isinstance(found.get("curve"), list):
        raise ValueError("it has no curve")
    curve = tuple(CurvePoint(**_checked(CurvePoint, point)) for point in found["curve"])
    record = Calibration(**{**_checked(Calibration, found), "curve": curve})
    for name in (record.policy, *(point.policy for point in curve)):
        policy = open_policy(name)
        if isinstance(policy, Budget) or policy.encoder not in (None, record.encoder):
            raise ValueError(f"{name} is no policy that chunks encoded {record.encoder} can have")
    record.cheapest(record.budget)
    return record


_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "float": (float, int),
    "int": int,
    "dict[str, str]": dict,
    "tuple[CurvePoint, ...]": list,
}


def _checked(kind: type[CurvePoint] | type[Calibration], found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise TypeError(f"a {kind.__name__} must be an object")
    out = {}
    for field in fields(kind):
        value = found.get(field.name)
        if not isinstance(value, _TYPES[str(field.type)]) or isinstance(value, bool):
            raise TypeError(f"{field.name!r} is missing or of a wrong type")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name!r} is not finite")
        out[field.name] = value
    return out
