"""What the check of ``auto`` measured, and its file in the cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ragcachekit.files import parse_json, read_regular, replace_file
from ragcachekit.policies.auto import ALONE, Pair
from ragcachekit.reports import Report

log = logging.getLogger(__name__)

SCHEMA = 1


@dataclass(frozen=True)
class TuneRow(Report):
    """A measured pair; means over its ``prompts``.

    ``kl`` is KL(full || pair) in nats per answer token, ``ratio`` recomputed / cached rows.
    """

    encoder: str
    policy: str
    kl: float
    ratio: float
    prompts: int

    @property
    def pair(self) -> Pair:
        """Encoder and policy."""
        return self.encoder, self.policy


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
    def pair(self) -> Pair:
        """Encoder and policy of the choice."""
        return self.encoder, self.policy

    @property
    def alone(self) -> Pair | None:
        """The best pair over chunks encoded alone, if one was measured."""
        rows = [row for row in self.rows if row.encoder == ALONE]
        return min(rows, key=lambda row: row.kl).pair if rows else None

    def _shown(self) -> list[tuple[str, object]]:
        return [field for field in super()._shown() if field[0] not in ("fingerprint", "system")]

    def __str__(self) -> str:
        head = ("encoder", "policy", "recomputed", "KL", "prompts", "")
        lines = [head] + [
            (row.encoder, row.policy, f"{row.ratio:.1%}", f"{row.kl:.4f}", str(row.prompts), "chosen")
            if row.pair == self.pair
            else (row.encoder, row.policy, f"{row.ratio:.1%}", f"{row.kl:.4f}", str(row.prompts), "")
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def record_path(folder: Path, fingerprint: str, namespace: str, scope: str) -> Path:
    """File of a model, a namespace and a ``scope``: the encoder that the user gave, if any."""
    name = hashlib.sha256(f"{fingerprint}\0{namespace}\0{scope}".encode()).hexdigest()
    return folder / "auto" / f"{name}.json"


def write_report(path: Path, report: TuneReport) -> None:
    """Store a report, atomically and with mode 0600; OSError if the folder cannot be written."""
    replace_file(path, json.dumps({"schema": SCHEMA, **asdict(report)}, indent=1))


def read_report(path: Path, fingerprint: str, namespace: str, pairs: Collection[Pair]) -> TuneReport | None:
    """The stored report over exactly these ``pairs``, or None; an invalid one is logged."""
    try:
        report = _parsed(parse_json(read_regular(path, own=True)))
        if (report.fingerprint, report.namespace) != (fingerprint, namespace):
            raise ValueError("it is about another model or namespace")
        if {row.pair for row in report.rows} != set(pairs):
            raise ValueError("its candidates are not those of this version")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("the record %s of policy='auto' is not used: %s", path, error)
        return None
    return report


def _parsed(found: Any) -> TuneReport:
    if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
        raise ValueError(f"it is no record of schema {SCHEMA}")
    rows = tuple(TuneRow(**row) for row in found.pop("rows"))
    system = tuple(found.pop("system"))
    report = TuneReport(**found, rows=rows, system=system)
    if report.pair not in {row.pair for row in rows}:
        raise ValueError("its choice was not measured")
    if not all(math.isfinite(row.kl + row.ratio) for row in rows):
        raise ValueError("its rows are not finite")
    if not all(type(token) is int and token >= 0 for token in system):
        raise ValueError("its system text is no list of token ids")
    return report
