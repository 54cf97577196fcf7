"""The stored calibration record of a model and a corpus."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ragcachekit.files import make_folder, parse_json, read_regular
from ragcachekit.policies.budgets.budget import Budget
from ragcachekit.policies.registry import open_policy

log = logging.getLogger(__name__)

SCHEMA = 1
FULL = "full"


@dataclass(frozen=True)
class CurvePoint:
    """One candidate, measured.

    Attributes
    ----------
    policy : str
    ratio : float
        Recomputed / cached rows truly spent, mean over the questions.
    f1 : float
        Mean F1.
    loss : float
        Mean F1 of ``full`` minus ``f1``, paired by question.
    doubt : float
        Probability that the first token of full's answer loses, mean.
    upper : float
        The higher one of the one-sided 90 % upper bounds of ``loss`` and ``doubt``: what a budget is
        compared with.
    """

    policy: str
    ratio: float
    f1: float
    loss: float
    doubt: float
    upper: float


@dataclass(frozen=True)
class Calibration:
    """What ``ragcachekit calibrate`` measured.

    Attributes
    ----------
    fingerprint, namespace, encoder : str
        For which model, corpus and encoding it holds.
    budget : float
        The budget that was asked for.
    policy : str
        The cheapest candidate within it.
    ratio : float
        What that spends.
    curve : tuple of CurvePoint
        All candidates by the ratio they spend; ``full`` is the last.
    n : int
        Questions.
    quality : str
        ``answers`` (F1 against right answers) or ``agreement`` (generated probes: against full's answer).
    seed : int
        Of probes and bootstrap.
    versions : dict of str to str
    date : str
        ISO 8601, UTC.
    """

    fingerprint: str
    namespace: str
    encoder: str
    budget: float
    policy: str
    ratio: float
    curve: tuple[CurvePoint, ...]
    n: int
    quality: str
    seed: int
    versions: dict[str, str]
    date: str

    def cheapest(self, loss: float) -> CurvePoint:
        """As :func:`cheapest`, of this curve."""
        return cheapest(self.curve, loss)


def cheapest(curve: Sequence[CurvePoint], loss: float) -> CurvePoint:
    """The candidate that spends least among those whose upper bound of the loss is within ``loss``.

    ``full`` loses nothing, so there always is one.

    Raises
    ------
    ValueError
        If the curve does not hold ``full``.
    """
    within = [point for point in curve if point.upper <= loss or point.policy == FULL]
    if not any(point.policy == FULL for point in within):
        raise ValueError("a calibration curve holds 'full', which loses nothing")
    return min(within, key=lambda point: (point.ratio, point.upper))


def record_path(folder: Path, fingerprint: str, namespace: str) -> Path:
    """Where the record of a model and a namespace is kept."""
    name = hashlib.sha256(f"{fingerprint}\0{namespace}".encode()).hexdigest()
    return folder / "calibrations" / f"{name}.json"


def write_record(folder: Path, record: Calibration) -> Path:
    """Store a record in place of an earlier one: mode 0600, whole or not at all.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    path = record_path(folder, record.fingerprint, record.namespace)
    make_folder(path.parent)
    temp = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}")
    try:
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"schema": SCHEMA, **asdict(record)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    return path


def read_record(folder: Path, fingerprint: str, namespace: str) -> Calibration | None:
    """The stored record, or None; one that cannot be trusted counts as none, with a logged warning."""
    path = record_path(folder, fingerprint, namespace)
    try:
        record = parsed(parse_json(read_regular(path, own=True)))
        if (record.fingerprint, record.namespace) != (fingerprint, namespace):
            raise ValueError("it is about another model or namespace")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("the calibration record %s is not used: %s", path, error)
        return None
    return record


def parsed(found: Any) -> Calibration:
    """A record from JSON data.

    Raises
    ------
    ValueError, TypeError
        For anything that :func:`write_record` would not have written.
    """
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
