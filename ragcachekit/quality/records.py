"""What was measured, as stored in the cache folder: the choice of ``auto``, and calibrations for budgets."""

from __future__ import annotations

import hashlib
import html
import json
import logging
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from ragcachekit.files import parse_json, read_regular, replace_file
from ragcachekit.policies.base import PolicyAndEncoder, SelectionPolicy
from ragcachekit.policies.measured import Auto, Budget
from ragcachekit.policies.registry import open_policy
from ragcachekit.reports import Report

log = logging.getLogger(__name__)

FULL = "full"
SCHEMA = 4


@dataclass(frozen=True)
class TuneRow(Report):
    """A measured policy and encoder; means over ``prompts``.

    ``kl`` is KL(full || this) in nats per answer token, ``ratio`` recomputed / cached rows, ``prefill_ms``
    the median time of the linked prefill.
    """

    encoder: str
    policy: str
    kl: float
    ratio: float
    prefill_ms: float
    prompts: int

    @property
    def pair(self) -> PolicyAndEncoder:
        return PolicyAndEncoder(self.policy, self.encoder)


@dataclass(frozen=True)
class TuneReport(Report):
    """What :meth:`ragcachekit.RagCache.tune` measured and chose.

    - ``encoder``, ``policy``: The choice.
    - ``rows``: One per candidate. Candidates that were clearly worse have fewer prompts.
    - ``seconds``: Duration without waiting for requests.
    - ``date``: ISO 8601, UTC.
    - ``system``: Token ids of the text before the first chunk.
    """

    fingerprint: str
    namespace: str
    encoder: str
    policy: str
    rows: tuple[TuneRow, ...]
    seconds: float
    date: str
    system: tuple[int, ...] = field(default=(), repr=False)

    @property
    def pair(self) -> PolicyAndEncoder:
        """Policy and encoder of the choice."""
        return PolicyAndEncoder(self.policy, self.encoder)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [("encoder", "policy", "recomputed", "KL", "prefill ms", "prompts", "")]
        for row in self.rows:
            chosen = "chosen" if row.pair == self.pair else ""
            figures = f"{row.ratio:.1%}", f"{row.kl:.4f}", f"{row.prefill_ms:.0f}", str(row.prompts)
            lines.append((row.encoder, row.policy, *figures, chosen))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


@dataclass(frozen=True)
class CurvePoint:
    """A calibrated candidate."""

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
    budget: float  # that it was calibrated for
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


_R = TypeVar("_R", TuneReport, Calibration)


def calibration_path(folder: Path, fingerprint: str, namespace: str) -> Path:
    """File of the calibration of a model and a namespace."""
    return _path(folder / "calibrations", fingerprint, namespace)


def choice_path(folder: Path, fingerprint: str, namespace: str, scope: str) -> Path:
    """File of the choice of ``auto``; ``scope`` is the encoder that the user gave, if any."""
    return _path(folder / "auto", fingerprint, namespace, scope)


def write_record(path: Path, record: TuneReport | Calibration) -> None:
    """Store a record, atomically and with mode 0600; OSError if the folder cannot be written."""
    replace_file(path, json.dumps({"schema": SCHEMA, **asdict(record)}, indent=1))


def read_calibration(folder: Path, fingerprint: str, namespace: str) -> Calibration | None:
    """The stored calibration, or None; an invalid one counts as none and is logged."""

    def parse(found: dict[str, Any]) -> Calibration:
        record = Calibration(**found | {"curve": tuple(CurvePoint(**point) for point in found["curve"])})
        for point in record.curve:
            policy = open_policy(point.policy)
            if isinstance(policy, Budget | Auto) or policy.encoder not in (None, record.encoder):
                raise ValueError(f"{point.policy} is no policy that chunks encoded {record.encoder} can have")
        record.cheapest(record.budget)
        return record

    return _read(calibration_path(folder, fingerprint, namespace), fingerprint, namespace, parse)


def read_choice(
    path: Path, fingerprint: str, namespace: str, pairs: Collection[PolicyAndEncoder]
) -> TuneReport | None:
    """The stored report over exactly these ``pairs``, or None; an invalid one is logged."""

    def parse(found: dict[str, Any]) -> TuneReport:
        rows, system = (TuneRow(**row) for row in found["rows"]), tuple(found["system"])
        report = TuneReport(**found | {"rows": tuple(rows), "system": system})
        if report.pair not in pairs or {row.pair for row in report.rows} != set(pairs):
            raise ValueError("its candidates are not those of this version")
        if not all(type(token) is int and token >= 0 for token in system):
            raise ValueError("its system text is no list of token ids")
        return report

    return _read(path, fingerprint, namespace, parse)


def _path(folder: Path, *parts: str) -> Path:
    return folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.json"


def _read(path: Path, fingerprint: str, namespace: str, parse: Callable[[dict[str, Any]], _R]) -> _R | None:
    try:
        found = parse_json(read_regular(path, own=True))
        if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
            raise ValueError(f"it is no record of schema {SCHEMA}")
        record = parse(found)
        if (record.fingerprint, record.namespace) != (fingerprint, namespace):
            raise ValueError("it is about another model or namespace")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("the record %s is not used: %s", path, error)
        return None
    return record


# -- what quality budgets stand for ----------------------------------------------------------------------

_TODO = "every prompt is computed in full; `ragcachekit calibrate` finds what it stands for"


@dataclass(frozen=True, eq=False)
class ResolvedPolicy:
    """The concrete policy of a request, with its name in the report (``budget:0.05 -> lego:4``).

    ``fallback`` is the reason for a prefill in full, if any.
    """

    policy: SelectionPolicy
    label: str
    notes: tuple[str, ...] = ()
    fallback: str | None = None


class Budgets:
    """Calibrated policies of one model and encoder, from records in the cache ``folder``. Thread safe.

    ``record`` reads that of a namespace, ``resolve`` gives the concrete policy of a budget and a
    namespace, once each: a new calibration applies to objects made afterwards.
    """

    def __init__(self, folder: Path, fingerprint: str, encoder: str) -> None:
        self._encoder = encoder
        self.record = cache(partial(read_calibration, folder, fingerprint))
        self.resolve = cache(self._resolve)

    def _resolve(self, budget: Budget, namespace: str) -> ResolvedPolicy:
        """The concrete policy: that of the record, or ``full`` with one logged warning per budget."""
        record, found, why = self.record(namespace), FULL, None
        if record is None:
            why = f"it is not calibrated for this model and namespace {namespace!r}"
        elif record.encoder != self._encoder:
            why = f"it was calibrated for the encoder {record.encoder}, and this one is {self._encoder}"
        elif (found := record.cheapest(budget.loss).policy) == FULL:
            why = f"no candidate calibrated on {record.n} questions ({record.quality}) is surely within it"
        if why is not None:
            log.warning("%s: %s; %s", budget.name, why, _TODO)
        notes = (f"{budget.name}: {why}",) if why is not None else ()
        return ResolvedPolicy(open_policy(found), f"{budget.name} -> {found}", notes)
