"""Resolution of quality budgets by the stored calibration."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.budgets.budget import Budget
from ragcachekit.policies.budgets.calibration import FULL, Calibration, read_record
from ragcachekit.policies.registry import open_policy

log = logging.getLogger(__name__)

_TODO = "every prompt is computed in full; `ragcachekit calibrate` finds what it stands for"


@dataclass(frozen=True, eq=False)
class Chosen:
    """The concrete policy of a request, with its name in the report (``budget:0.01 -> lego:4``).

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

    def _resolve(self, budget: Budget, namespace: str) -> Chosen:
        if namespace not in self._records:
            self._records[namespace] = read_record(self._folder, self._fingerprint, namespace)
        record = self._records[namespace]
        found, why = FULL, None
        if record is None:
            why = f"it is not calibrated for this model and namespace {namespace!r}"
        elif record.encoder != self._encoder:
            why = f"it was calibrated for the encoder {record.encoder}, and this one is {self._encoder}"
        elif (found := record.cheapest(budget.loss).policy) == FULL:
            why = f"none of the candidates calibrated on {record.n} questions is surely within it"
        if why is not None:
            log.warning("%s: %s; %s", budget.name, why, _TODO)
        notes = (f"{budget.name}: {why}",) if why is not None else ()
        return Chosen(open_policy(found), f"{budget.name} -> {found}", notes)
