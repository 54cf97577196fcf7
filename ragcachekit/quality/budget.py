"""The policies that quality budgets stand for, by stored calibrations."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.measured import Budget
from ragcachekit.policies.registry import open_policy
from ragcachekit.quality.records import FULL, read_calibration

log = logging.getLogger(__name__)

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

    ``record`` reads that of a namespace, once: a new calibration applies to objects made afterwards.
    """

    def __init__(self, folder: Path, fingerprint: str, encoder: str) -> None:
        self._encoder, self._lock = encoder, threading.Lock()
        self.record = cache(partial(read_calibration, folder, fingerprint))
        self._resolved: dict[tuple[str, float], ResolvedPolicy] = {}

    def resolve(self, policy: Budget, namespace: str) -> ResolvedPolicy:
        """The concrete policy: that of the record, or ``full`` with one logged warning per budget."""
        key = namespace, policy.loss
        with self._lock:
            if key not in self._resolved:
                self._resolved[key] = self._resolve(policy, namespace)
            return self._resolved[key]

    def _resolve(self, budget: Budget, namespace: str) -> ResolvedPolicy:
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
