"""Requests whose turn has come: planned, prefilled, decoded together, answered."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Event
from typing import Any

from ragcachekit.cancellation import CancelScope
from ragcachekit.config import QueueConfig
from ragcachekit.engine.components import EngineComponents
from ragcachekit.engine.queue.request import Late, Request
from ragcachekit.engine.request_path import RequestPath
from ragcachekit.forward.own_rows import own_entries
from ragcachekit.generate.batch.decoder import BatchDecoder
from ragcachekit.generate.batch.decoding import Decoding
from ragcachekit.generate.hooks import FirstScores
from ragcachekit.generate.run import Generated
from ragcachekit.plan.link_plan import LinkPlan, plain_plan
from ragcachekit.plan.request import PromptRequest
from ragcachekit.reports import Answer, GenerateReport
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Run:
    """A running request: when its turn began, what shadow mode drew, and its tokens so far."""

    begun: float
    first: FirstScores | None = None
    decoding: Decoding | None = None
    whole: Generated | None = None  # of a request that was not decoded in the batch
    captured: frozenset[KVKey] | None = None


class Runner:
    """Runs the requests of one queue, in the queue's thread."""

    def __init__(self, config: QueueConfig, components: EngineComponents, path: RequestPath) -> None:
        self._config, self._components, self._path = config, components, path
        self._runs: dict[Request, _Run] = {}
        self._wanted = Counter[KVKey]()  # entries of waiting requests
        self.steps = self.decoded = 0

    @property
    def requests(self) -> list[Request]:
        """The running requests."""
        return list(self._runs)

    def note_waiting(self, request: Request) -> None:
        """Count the entries of a request that waits."""
        self._wanted.update(want.to_encode.key for want in request.work.prompt.wanted)

    def note_left(self, request: Request) -> None:
        """Count them no longer."""
        for want in request.work.prompt.wanted:
            key = want.to_encode.key
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]

    def prefetch(self, request: Request) -> None:
        """Load entries of a waiting request from slow tiers, once."""
        if not request.prefetched:
            request.prefetched = True
            self._components.loads.prefetch(request.work.estimator.to_load)

    def is_ready(self, request: Request) -> bool:
        """Whether its prefill would not wait for entries that are being loaded or stored."""
        work, parts = request.work, self._components
        if parts.capture.pending.concern(work.prompt):
            return False
        return parts.loads.hidden(work.estimator.to_load, work.estimator.rows)

    def has_room(self, request: Request) -> bool:
        """Whether the request may begin beside those that run, which need not wait for it."""
        if self._runs and self._components.capture.pending.concern(request.work.prompt):
            return False
        return self._decoder.has_room(request.work.tokens)

    def begin(self, request: Request, closed: Event) -> bool:
        """Plan and prefill a request; True if its answer is complete. ``closed`` cancels it."""
        run = self._runs[request] = _Run(time.perf_counter())
        work, options = request.work, request.work.asked.options
        with work.scope, CancelScope(closed), CancelScope(work.cancel), CancelScope(Late(work.deadline)):
            run.first = self._components.shadow.draw(options)
            # A changed model may attend by other code than the batch's.
            unchanged = self._components.planner.unchanged()
            why = self._decoder.unsupported(options) if unchanged else "the model changed"
            note = () if why is None else (f"generated alone and not in a batch: {why}",)
            prompt = replace(request.work.prompt, notes=(*request.work.prompt.notes, *note))
            try:
                self._begin(request, run, self._planned(prompt), why is None)
            except Exception as error:
                streamer = request.work.streamer
                if not prompt.reads_cache or (streamer is not None and streamer.streamed):
                    raise
                log.warning("a linked prompt failed and is computed in full", exc_info=True)
                if streamer is not None:
                    streamer.restart()
                run.first = None  # nothing is reused, so there is nothing to compare
                full = replace(prompt, fallback=f"the linked prompt failed: {error!r}")
                self._begin(request, run, self._path.begin(full), why is None)
        return run.whole is not None or (run.decoding is not None and run.decoding.finished)

    def step(self) -> list[Request]:
        """Decode a token for each request of the batch; returns those that ended."""
        active = self._decoder.active
        if not active:
            return []
        self.steps += 1
        self.decoded += len(active)
        for run_request, run in self._runs.items():
            if run.decoding is not None:
                run_request.batch = max(run_request.batch, len(active))
        ended = self._decoder.step()
        return [request for request, run in self._runs.items() if run.decoding in ended]

    def answer(self, request: Request) -> Answer:
        """The answer of a request that has ended, once the caches have followed."""
        run, work = self._runs.pop(request), request.work
        generated = run.whole
        if generated is None:
            assert run.decoding is not None, "begun"
            generated = run.decoding.generated()
        answer = self._path.finish(generated, work.asked, run.first, run.begun, run.captured)
        self._path.check_auto(generated.plan)
        queued, report = (run.begun - work.submitted) * 1e3, answer.report
        report = replace(
            report,
            ttft_ms=report.ttft_ms + queued,
            total_ms=report.total_ms + queued,
            queue_ms=queued,
            batch=max(1, request.batch),
        )
        self._path.reports.append(report)
        return replace(answer, report=report)

    def nothing(self, request: Request) -> Answer:
        """The answer of a request that was cancelled before its turn."""
        waited = (time.perf_counter() - request.work.submitted) * 1e3
        link = plain_plan(request.work.prompt).report
        return Answer("", (), GenerateReport(link, 0, waited, waited, "cancelled", waited))

    def drop(self, request: Request) -> None:
        """End a running request without an answer."""
        run = self._runs.pop(request, None)
        if run is not None and run.decoding is not None:
            self._decoder.drop(run.decoding)

    def clear(self) -> list[Request]:
        """End all running requests without an answer; returns them."""
        requests, self._runs = list(self._runs), {}
        try:
            self._decoder.clear()
        except Exception:
            log.exception("a batch could not be cleared; the next request opens another")
            self.__dict__.pop("_decoder", None)
        return requests

    @cached_property
    def _decoder(self) -> BatchDecoder:
        return self._components.generator.batch_decoder(self._config)

    def _planned(self, prompt: PromptRequest) -> LinkPlan:
        """The plan, after entries that waiting requests miss too were encoded, once for all of them."""
        plan, encoder = self._path.begin(prompt), self._components.background_encoder
        forgot = self._components.forgets.forgot
        wanted = [item for item in plan.missing if self._wanted[item.key]] if self._path.own else []
        missing = [item for item in wanted if not forgot(item.key, item.epoch)]
        if missing:
            captured = {item.key for item in own_entries(plan)}
            missing = [i for i in missing if i.key not in captured and not encoder.refused([i.key])]
        if not missing:
            return plan
        encoder.now(missing)
        tokens = sum(len(item.token_ids) for item in missing)
        note = f"{tokens} of its tokens were encoded before it, for requests that wait too"
        return self._path.begin(replace(prompt, notes=(*prompt.notes, note)))

    def _begin(self, request: Request, run: _Run, plan: LinkPlan, together: bool) -> None:
        asked, decoder, path = request.work.asked, self._decoder, self._path
        how: dict[str, Any] = {"stop": asked.stop, "cancel": asked.cancel, "first": run.first}
        how |= {"own": path.own, "replan": path.plan}
        if not together:
            run.whole = decoder.run(plan, asked.options, **how)
            return
        run.decoding = decoder.begin(plan, asked.options, **how)
        if self._wanted and not run.decoding.finished:
            run.captured = path.capture(run.decoding.generated())
