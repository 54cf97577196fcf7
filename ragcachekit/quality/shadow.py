"""Shadow mode: some prompts are prefilled a second time in full, to see what reuse does to their answers."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from ragcachekit.config import ShadowConfig
from ragcachekit.errors import Cancelled
from ragcachekit.forward.prefill import LinkedPrompt
from ragcachekit.plan.link_plan import LinkPlan, PromptRequest
from ragcachekit.quality.compare import Comparison, Continuation, compare, full_answer
from ragcachekit.reports import LinkReport, ShadowReport
from ragcachekit.threads import BackgroundWorker, Pause

log = logging.getLogger(__name__)

MAX_WAITING = 32  # prompts that may wait; further ones are dropped, and counted


class _Tally:
    """The comparisons of one namespace; ``recent``: whether each of the last ones differed."""

    def __init__(self, window: int) -> None:
        self.recent: deque[bool] = deque(maxlen=window)
        self.counts: Counter[str] = Counter()
        self.agreement = self.kl_sum = self.kl_max = 0.0
        self.warned = False
        self.fallback: str | None = None

    def add(self, found: Comparison) -> None:
        self.counts["shadowed"] += 1
        self.agreement += found.agreement
        self.kl_sum += found.kl
        self.kl_max = max(self.kl_max, found.kl)
        self.recent.append(found.agreement < 1)


class Shadow:
    """Draws requests, and compares their linked prompts with a full prefill, in the background.

    ``link`` plans and links a prompt again. Errors are logged and counted; they never reach an answer.
    Nothing is compared once the model has changed (``unchanged``). ``pause`` slows the thread down.
    """

    def __init__(
        self,
        config: ShadowConfig,
        model: Any,
        link: Callable[[PromptRequest], tuple[LinkedPrompt, LinkPlan]],
        unchanged: Callable[[], bool],
        worker: BackgroundWorker,
        pause: Pause | None = None,
    ) -> None:
        self.config, self._model, self._link, self._unchanged = config, model, link, unchanged
        self._lock = threading.Lock()
        self._random = random.Random(config.seed)
        self._tallies: dict[str, _Tally] = {}
        self._jobs = worker.queue(self._work, MAX_WAITING, pause)

    def fallback(self, namespace: str) -> str | None:
        """Why prompts of this namespace have to be computed in full, or None."""
        tally = self._tallies.get(namespace)
        return tally.fallback if tally is not None else None

    def follow(self, request: PromptRequest, report: LinkReport) -> None:
        """Count an answered request; if it is drawn and its reuse was approximate, compare it later."""
        with self._lock:
            tally = self._tallies.setdefault(request.namespace, _Tally(self.config.window))
            tally.counts["requests"] += 1
            drawn = self._random.random() < self.config.share
        if drawn and report.approximate_tokens and not self._jobs.add((tally, request)):
            self._count(tally, "dropped")

    def report(self, namespace: str | None = None) -> ShadowReport:
        """Results since the last :meth:`reset`, in one namespace or (None) in all together."""
        with self._lock:
            tallies = [t for name, t in self._tallies.items() if namespace in (None, name)]
            counts = sum((t.counts for t in tallies), Counter[str]())
            shadowed = counts["shadowed"]
            return ShadowReport(
                requests=counts["requests"],
                shadowed=shadowed,
                agreement=sum(t.agreement for t in tallies) / shadowed if shadowed else None,
                mean_kl=sum(t.kl_sum for t in tallies) / shadowed if shadowed else None,
                max_kl=max(t.kl_max for t in tallies) if shadowed else None,
                recent_disagreement=max((sum(t.recent) for t in tallies), default=0) / self.config.window,
                waiting=self._jobs.waiting,
                dropped=counts["dropped"],
                failed=counts["failed"],
                falling_back=any(t.fallback for t in tallies),
            )

    def reset(self, namespace: str | None = None) -> None:
        """Drop all results, of one namespace or of all, and those of jobs under way."""
        with self._lock:
            for name in list(self._tallies) if namespace is None else [namespace]:
                self._tallies.pop(name, None)

    def _work(self, job: tuple[_Tally, PromptRequest]) -> None:
        tally, request = job  # not the namespace's present tally: it may have been reset
        if not self._unchanged():
            return
        try:
            linked, plan = self._link(request)
            if plan.report.approximate_tokens:  # else evicted or forgotten meanwhile
                reference = full_answer(self._model, plan.token_ids)
                found = compare(Continuation(self._model, linked.inputs), reference)
                self._add(tally, request.namespace, found)
        except Cancelled:
            self._count(tally, "dropped")
        except Exception:
            log.warning("a shadow prefill failed", exc_info=True)
            self._count(tally, "failed")

    def _add(self, tally: _Tally, namespace: str, found: Comparison) -> None:
        with self._lock:
            tally.add(found)
            wrong, bound = sum(tally.recent), self.config.bound * self.config.window
            if wrong <= bound or tally.warned:
                return
            tally.warned = True
            reason = (
                f"{wrong} of the last {len(tally.recent)} shadowed prompts were answered differently by a "
                f"full prefill; the bound is {bound:g} of {self.config.window}"
            )
            tally.fallback = f"shadow mode: {reason}" if self.config.fall_back else None
        then = "prompts are computed in full from now on" if self.config.fall_back else "reuse goes on"
        log.warning("namespace %r: %s; %s", namespace, reason, then)

    def _count(self, tally: _Tally, what: str) -> None:
        with self._lock:
            tally.counts[what] += 1
