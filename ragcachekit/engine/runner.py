"""Requests whose turn has come: planned, prefilled, decoded together, answered."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Event
from typing import Any

from ragcachekit.cancellation import CancelScope
from ragcachekit.config import QueueConfig
from ragcachekit.engine.after_answer import AfterAnswer
from ragcachekit.engine.components import EngineComponents
from ragcachekit.engine.request import Request
from ragcachekit.forward.prefill import Replan
from ragcachekit.forward.rows import own_entries
from ragcachekit.generate.batch import BatchDecoder, Decoding
from ragcachekit.generate.run import FirstScores, Generated, answer_of
from ragcachekit.plan.link_plan import LinkPlan, plain_plan
from ragcachekit.plan.request import PromptRequest
from ragcachekit.reports import Answer, GenerateReport
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)


class _DeadlinePassed(Event):
    """Set once a deadline, in seconds of :func:`time.monotonic`, has passed."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def is_set(self) -> bool:
        return self._deadline < time.monotonic()


@dataclass(eq=False)
class _Run:
    """A running request: when its turn began, what shadow mode drew, and its tokens so far."""

    begun: float
    first: FirstScores | None = None
    decoding: Decoding | None = None
    alone: Generated | None = None  # of a request that was not decoded in the batch
    captured: frozenset[KVKey] | None = None


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
        self.wanted = Counter[KVKey]()  # entries of waiting requests
        self.steps = self.decoded = 0

    @property
    def requests(self) -> list[Request]:
        """The running requests."""
        return list(self.runs)

    # -- requests that wait ------------------------------------------------------------------------

    def note_waiting(self, request: Request) -> None:
        """Count the entries of a request that waits."""
        self.wanted.update(want.to_encode.key for want in request.call.prompt.wanted)

    def note_left(self, request: Request) -> None:
        """Count them no longer."""
        for want in request.call.prompt.wanted:
            key = want.to_encode.key
            self.wanted[key] -= 1
            if not self.wanted[key]:
                del self.wanted[key]

    def prefetch(self, request: Request) -> None:
        """Load entries of a waiting request from slow tiers, once."""
        if not request.prefetched:
            request.prefetched = True
            self._parts.loads.prefetch(request.call.estimator.to_load)

    def is_ready(self, request: Request) -> bool:
        """Whether its prefill would not wait for entries that are being loaded or stored."""
        call = request.call
        if self._after_answer.pending.concern(call.prompt):
            return False
        return self._parts.loads.hidden(call.estimator.to_load, call.estimator.rows)

    def has_room(self, request: Request) -> bool:
        """Whether the request may begin beside those that run, which need not wait for it."""
        if self.runs and self._after_answer.pending.concern(request.call.prompt):
            return False
        return self.decoder.has_room(request.call.tokens)

    # -- requests that run -------------------------------------------------------------------------

    def begin(self, request: Request, closed: Event) -> bool:
        """Plan and prefill a request; True if its answer is complete. ``closed`` cancels it."""
        run = self.runs[request] = _Run(time.perf_counter())
        call, streamer = request.call, request.call.streamer
        with (
            call.scope,
            CancelScope(closed),
            CancelScope(call.cancel),
            CancelScope(_DeadlinePassed(call.deadline)),
        ):
            run.first = self._parts.shadow.draw(call.options)
            # A changed model may attend by other code than the batch's.
            unchanged = self._parts.planner.unchanged()
            why = self.decoder.why_alone(call.options) if unchanged else "the model changed"
            prompt = call.prompt
            if why is not None:
                prompt = prompt.with_note(f"generated alone and not in a batch: {why}")
            try:
                self._prefill(request, run, self._planned(prompt), why is None)
            except Exception as error:
                if not prompt.reads_cache or (streamer is not None and streamer.streamed):
                    raise
                log.warning("a linked prompt failed and is computed in full", exc_info=True)
                if streamer is not None:
                    streamer.restart()
                run.first = None  # nothing is reused, so there is nothing to compare
                full = replace(prompt, fallback=f"the linked prompt failed: {error!r}")
                self._prefill(request, run, self._plan(full), why is None)
        return run.alone is not None or (run.decoding is not None and run.decoding.finished)

    def step(self) -> list[Request]:
        """Decode a token for each request of the batch; returns those that ended."""
        active = self.decoder.active
        if not active:
            return []
        self.steps += 1
        self.decoded += len(active)
        for request, run in self.runs.items():
            if run.decoding is not None:
                request.batch = max(request.batch, len(active))
        ended = self.decoder.step()
        return [request for request, run in self.runs.items() if run.decoding in ended]

    def answer(self, request: Request) -> Answer:
        """The answer of a request that has ended, once the caches have followed."""
        run, call = self.runs.pop(request), request.call
        generated = run.alone
        if generated is None:
            assert run.decoding is not None, "begun"
            generated = run.decoding.generated()
        answer = answer_of(generated, run.begun, call.stop, call.options, self._parts.parser.decode)
        self._after_answer.submit(generated, answer, call, run.first, run.captured)
        queued, report = (run.begun - call.submitted_at) * 1e3, answer.report
        report = replace(
            report,
            ttft_ms=report.ttft_ms + queued,
            total_ms=(time.perf_counter() - call.submitted_at) * 1e3,
            queue_ms=queued,
            batch=max(1, request.batch),
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

    @cached_property
    def decoder(self) -> BatchDecoder:
        parts, config = self._parts, self._config
        return BatchDecoder(
            parts.model,
            parts.rope,
            decode=parts.parser.decode,
            max_batch=config.max_batch,
            max_bytes=config.batch_bytes,
        )

    def _planned(self, prompt: PromptRequest) -> LinkPlan:
        """The plan, after entries that waiting requests miss too were encoded, once for all of them."""
        plan, encoder = self._plan(prompt), self._parts.background_encoder
        forgot = self._parts.forgets.forgot
        wanted = (
            [item for item in plan.missing if self.wanted[item.key]] if self._after_answer.captures else []
        )
        missing = [item for item in wanted if not forgot(item.key, item.epoch)]
        if missing:
            captured = {item.key for item in own_entries(plan)}
            missing = [i for i in missing if i.key not in captured and not encoder.refused([i.key])]
        if not missing:
            return plan
        encoder.now(missing)
        tokens = sum(len(item.token_ids) for item in missing)
        return self._plan(
            prompt.with_note(f"{tokens} of its tokens were encoded before it, for requests that wait too")
        )

    def _prefill(self, request: Request, run: _Run, plan: LinkPlan, together: bool) -> None:
        call, decoder, after = request.call, self.decoder, self._after_answer
        how: dict[str, Any] = {"stop": call.stop, "cancel": call.cancel, "first": run.first}
        how |= {"capture_missing_rows": after.captures, "replan": self._replan}
        if not together:
            run.alone = decoder.run(plan, call.options, **how)
            return
        run.decoding = decoder.begin(plan, call.options, **how)
        if self.wanted and not run.decoding.finished:
            run.captured = after.capture(run.decoding.generated())
