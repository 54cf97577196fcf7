"""A new plan when entries could not be loaded, and the report of what loads took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.plan.request import PromptRequest
from ragcachekit.reports import LinkReport
from ragcachekit.store.load import LoadFailed
from ragcachekit.types import KVKey

Replan = Callable[[PromptRequest, frozenset[KVKey]], LinkPlan]
"""Plans a request once more without some entries."""


def replanned(plan: LinkPlan, failed: LoadFailed, replan: Replan | None) -> LinkPlan:
    """The plan without what failed or was lost; its report notes it and counts the time waited."""
    lost = {load.key: load for load in plan.loads if load.key in failed.keys or load.lost is not None}
    assert lost, "nothing else would come of it"
    assert plan.request is not None, "loads are begun by plans of requests"
    assert replan is not None, "plans with loads need replan="
    why = "; ".join(dict.fromkeys(load.lost or str(failed) for load in lost.values()))
    note = f"{len(lost)} of its entries could not be loaded ({why}): their rows were computed"
    waited = plan.request.waited_ms + sum(load.waited for load in lost.values()) * 1e3
    request = replace(plan.request, notes=(*plan.request.notes, note), waited_ms=waited)
    return replan(request, plan.without | lost.keys())


def timed(plan: LinkPlan) -> LinkReport:
    """The plan's report with what its loads took, once no load is waited for any more."""
    report, loads = plan.report, plan.loads
    if not loads:
        return report
    own: dict[KVKey, float] = {load.key: load.waited for load in loads}
    wait_ms = report.wait_ms + sum(own.values()) * 1e3
    # Waking up takes time too: a wait can end later than the load.
    load_ms = max(report.load_ms + _covered(load.span for load in loads) * 1e3, wait_ms)
    return replace(report, load_ms=load_ms, wait_ms=wait_ms)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans ran."""
    total, end = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, end))
        end = max(end, ended)
    return total
