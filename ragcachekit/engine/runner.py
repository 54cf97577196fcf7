"""Requests whose turn has come: planned, prefilled, decoded together, answered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Event
from typing import Any

from ragcachekit.cancellation import CancelScope
from ragcachekit.config import QueueConfig
from ragcachekit.engine.after_answer import AfterAnswer
from ragcachekit.engine.components import EngineComponents
from ragcachekit.engine.request import Request
from ragcachekit.forward.linker import own_entries
from ragcachekit.forward.prefill import Replan
from ragcachekit.generate.batch import BatchDecoder, Decoding
from ragcachekit.generate.run import FirstScores, Generated, answer_of
from ragcachekit.plan.link_plan import LinkPlan, PromptRequest, plain_plan
from ragcachekit.reports import Answer, GenerateReport
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Run:
    """A running request: when its turn began, what shadow mode drew, and its tokens so far."""

    begun: float
    first: FirstScores | None = None
    decoding: Decoding | None = None
    alone: Generated | None = None  # of a request that was not decoded in the batch
    kept: frozenset[KVKey] | None = None
    batch: int = 1


class Runner:
    """Runs requests from their plan to their answer, in the scheduler's thread.

    ``plan`` makes the plan of a request now, ``replan`` another one without entries that could not be loaded.
    """

    def __init__(
        self,
        config: QueueConfig,
        components: EngineComponents,
        after_answer: AfterAnswer,
        plan: Callable[[PromptRequest], LinkPlan],
        replan: Replan,
    ) -> None:
        self._config, self._parts, self._after_answer = config, components, after_answer
        self._plan, self._replan = plan, replan
        self.runs: dict[Request, _Run] = {}
        self.steps = self.decoded = 0

    @cached_property
    def decoder(self) -> BatchDecoder:
        """The batch, opened with the first request."""
        parts, config = self._parts, self._config
        return BatchDecoder(
            parts.model,
            parts.rope,
            decode=parts.parser.decode,
            max_batch=config.max_batch,
            max_bytes=config.batch_bytes,
        )

    # -- requests that wait ------------------------------------------------------------------------

    def prefetch(self, request: Request) -> None:
        """Load entries of a waiting request from slow tiers, once."""
        if not request.prefetched and (loads := self._parts.loads) is not None:
            request.prefetched = True
            loads.prefetch(request.call.estimator.to_load)

    def is_ready(self, request: Request) -> bool:
        """Whether its prefill would not wait for entries that are being loaded or stored."""
        call = request.call
        if self._after_answer.awaits(call.prompt):
            return False
        loads = self._parts.loads
        return loads is None or loads.hidden(call.estimator.to_load, call.estimator.rows)

    def has_room(self, request: Request) -> bool:
        """Whether the request may begin beside those that run, which need not wait for it."""
        if self.runs and self._after_answer.awaits(request.call.prompt):
            return False
        return self.decoder.has_room(request.call.tokens)

    # -- requests that run -------------------------------------------------------------------------

    def begin(self, request: Request, closed: Event, wanted: Collection[KVKey]) -> bool:
        """Plan and prefill a request; True if its answer is complete.

        ``closed`` cancels it; ``wanted`` are entries of the requests that wait.
        """
        run = self.runs[request] = _Run(time.perf_counter())
        call, prompt = request.call, request.call.prompt
        with call.scope, CancelScope(closed), CancelScope(call.cancel, deadline=call.deadline):
            run.first = self._parts.shadow.draw(call.options)
            # A changed model may attend by other code than the batch's.
            unchanged = self._parts.planner.unchanged()
            why = self.decoder.why_alone(call.options) if unchanged else "the model changed"
            if why is not None:
                prompt = prompt.with_note(f"generated alone and not in a batch: {why}")
            try:
                self._prefill(request, run, self._planned(prompt, wanted), why is None)
            except Exception as error:
                if not prompt.reads_cache or (call.streamer is not None and call.streamer.streamed):
                    raise
                log.warning("a linked prompt failed and is computed in full", exc_info=True)
                if call.streamer is not None:
                    call.streamer.restart()
                run.first = None  # nothing is reused, so there is nothing to compare
                full = replace(prompt, fallback=f"the linked prompt failed: {error!r}")
                self._prefill(request, run, self._plan(full), why is None)
            if wanted and run.decoding is not None and not run.decoding.finished:
                run.kept = self._after_answer.keep_early(run.decoding.generated())
        return run.decoding is None or run.decoding.finished

    def step(self) -> list[Request]:
        """Decode a token for each request of the batch; returns those that ended."""
        active = self.decoder.active
        if not active:
            return []
        self.steps += 1
        self.decoded += len(active)
        for run in self.runs.values():
            run.batch = max(run.batch, len(active))
        ended = self.decoder.step()
        return [request for request, run in self.runs.items() if run.decoding in ended]

    def answer(self, request: Request) -> Answer:
        """The answer of a request that has ended, once the caches have followed."""
        run, call = self.runs.pop(request), request.call
        generated = run.decoding.generated() if run.decoding is not None else run.alone
        assert generated is not None, "begun"
        answer = answer_of(generated, run.begun, call.stop, call.options, self._parts.parser.decode)
        self._after_answer.submit(generated, answer, call, run.first, run.kept)
        queued, report = (run.begun - call.submitted_at) * 1e3, answer.report
        report = replace(
            report,
            ttft_ms=report.ttft_ms + queued,
            total_ms=(time.perf_counter() - call.submitted_at) * 1e3,
            queue_ms=queued,
            batch=run.batch,
        )
        self._after_answer.reports.append(report)
        return replace(answer, report=report)

    def empty_answer(self, request: Request) -> Answer:
        """The answer of a request that was cancelled before its turn."""
        waited = (time.perf_counter() - request.call.submitted_at) * 1e3
        link = plain_plan(request.call.prompt).report
        return Answer("", (), GenerateReport(link, 0, waited, waited, "cancelled", waited))

    def drop(self, request: Request) -> None:
        """End a running request without an answer."""
        run = self.runs.pop(request, None)
        if run is not None and run.decoding is not None:
            self.decoder.drop(run.decoding)

    def clear(self) -> list[Request]:
        """End all running requests without an answer; returns them."""
        requests, self.runs = list(self.runs), {}
        try:
            self.decoder.clear()
        except Exception:
            log.exception("a batch could not be cleared; the next request opens another")
            self.__dict__.pop("decoder", None)
        return requests

    def _planned(self, prompt: PromptRequest, wanted: Collection[KVKey]) -> LinkPlan:
        """The plan, after entries that waiting requests miss too were encoded, once for all of them."""
        plan, parts = self._plan(prompt), self._parts
        shared = [item for item in plan.missing if item.key in wanted and self._after_answer.captures]
        kept = {item.key for item in own_entries(plan)} if shared else set()
        missing = [
            item
            for item in shared
            if item.key not in kept
            and not parts.forgets.forgot(item.key, item.epoch)
            and not parts.background_encoder.refused([item.key])
        ]
        if not missing:
            return plan
        parts.background_encoder.now(missing)
        tokens = sum(len(item.token_ids) for item in missing)
        return self._plan(
            prompt.with_note(f"{tokens} of its tokens were encoded before it, for requests that wait too")
        )

    def _prefill(self, request: Request, run: _Run, plan: LinkPlan, together: bool) -> None:
        call = request.call
        how: dict[str, Any] = {"stop": call.stop, "cancel": call.cancel, "first": run.first}
        how |= {"capture_missing_rows": self._after_answer.captures, "replan": self._replan}
        if together:
            run.decoding = self.decoder.begin(plan, call.options, **how)
        else:
            run.alone = self.decoder.run(plan, call.options, **how)
