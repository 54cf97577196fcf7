"""Requests whose turn has come: planned, prefilled, decoded together, answered, and followed up."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Event, Lock
from time import monotonic, perf_counter
from typing import Any

import numpy as np

from ragcachekit.cancellation import Backoff, CancelScope, raise_if_cancelled
from ragcachekit.config import QueueConfig
from ragcachekit.encode.in_prompt import observe
from ragcachekit.engine.components import EngineComponents
from ragcachekit.engine.request import Request
from ragcachekit.forward.linker import own_entries, stop_of
from ragcachekit.forward.prefill import Replan
from ragcachekit.forward.rows import captured, keeps_turn, stretches_of, turn_of, with_answer
from ragcachekit.generate.batch import BatchDecoder, Decoding
from ragcachekit.generate.run import Generated, answer_of
from ragcachekit.plan.link_plan import LinkPlan, Missing, PromptRequest, plain_plan
from ragcachekit.plan.variants import VariantPool
from ragcachekit.policies.registry import open_policy
from ragcachekit.prefix_tree.nodes import Step
from ragcachekit.reports import Answer, GenerateReport
from ragcachekit.store.remote import waits_of
from ragcachekit.threads import Condition, attempt
from ragcachekit.types import Ids, KVKey

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """What is kept of a request's rows: ``keys`` that need no encoding, and how many ``tokens`` it computed.

    As :attr:`~ragcachekit.reports.LinkReport.written_tokens`.
    """

    keys: frozenset[KVKey] = frozenset()
    tokens: int = 0


@dataclass(eq=False)
class _Run:
    """A running request: when its turn began, and its tokens so far."""

    begun: float
    decoding: Decoding | None = None
    alone: Generated | None = None  # of a request that was not decoded in the batch
    kept: Kept | None = None
    batch: int = 1
    waits: list[float] = field(default_factory=list)  # for stores, in vain


class Runner:
    """Runs requests from their plan to their answer, in the scheduler's thread."""

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
            alone=parts.grade.alone,
        )

    # -- requests that wait ------------------------------------------------------------------------

    def prefetch(self, request: Request) -> None:
        """Load entries of a waiting request from slow tiers, once."""
        if not request.prefetched and (loads := self._parts.loads) is not None:
            request.prefetched = True
            loads.prefetch(request.estimator.to_load)

    def is_ready(self, request: Request) -> bool:
        """Whether its prefill would not wait for entries that are being loaded or stored."""
        if self._after_answer.awaits(request.prompt):
            return False
        loads = self._parts.loads
        return loads is None or loads.hidden(request.estimator.to_load, request.estimator.rows)

    def has_room(self, request: Request) -> bool:
        """Whether the request may begin beside those that run, which need not wait for it."""
        if self.runs and self._after_answer.awaits(request.prompt):
            return False
        return self.decoder.has_room(request.rows)

    # -- requests that run -------------------------------------------------------------------------

    def begin(self, request: Request, closed: Event, wanted: Collection[KVKey]) -> bool:
        """Plan and prefill a request; True if its answer is complete.

        ``closed`` cancels it; ``wanted`` are entries of the requests that wait.
        """
        run = self.runs[request] = _Run(perf_counter())
        prompt, streamer = request.prompt, request.streamer
        own = partial(CancelScope, request.ended, deadline=request.deadline)  # made inside the others
        with request.scope, CancelScope(closed), own(), waits_of(run.waits):
            # A changed model may attend by other code than the batch's.
            unchanged = self._parts.planner.unchanged()
            why = self.decoder.why_alone(request.options, request.rows) if unchanged else "the model changed"
            if why is not None:
                prompt = prompt.with_note(f"generated alone and not in a batch: {why}")
            try:
                self._prefill(request, run, self._planned(prompt, wanted), why is None)
            except Exception as error:
                if not prompt.reads_cache or (streamer is not None and streamer.streamed):
                    raise
                if streamer is not None:
                    streamer.restart()
                self._prefill(request, run, self._plan(prompt.after_failure(error)), why is None)
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
        run = self.runs.pop(request)
        generated = run.decoding.generated() if run.decoding is not None else run.alone
        assert generated is not None, "begun"
        answer = answer_of(generated, run.begun, request.stop, request.options, self._parts.parser.decode)
        with waits_of(run.waits):
            written = self._after_answer.submit(generated, request, run.kept, run.begun)
        queued, report = (run.begun - request.submitted_at) * 1e3, answer.report
        report = replace(
            report,
            link=replace(report.link, written_tokens=written),
            ttft_ms=report.ttft_ms + queued,
            total_ms=(perf_counter() - request.submitted_at) * 1e3,
            queue_ms=queued,
            batch=run.batch,
        )
        self._after_answer.reports.append(report)
        return replace(answer, report=report)

    def empty_answer(self, request: Request) -> Answer:
        waited = (perf_counter() - request.submitted_at) * 1e3
        link = plain_plan(request.prompt).report
        return Answer("", (), GenerateReport(link, 0, waited, waited, "cancelled", waited))

    def drop(self, request: Request) -> None:
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
        how: dict[str, Any] = {"stop": request.stop, "cancel": request.ended}
        how |= {"capture_missing_rows": self._after_answer.captures, "replan": self._replan}
        if together:
            run.decoding = self.decoder.begin(plan, request.options, **how)
        else:
            run.alone = self.decoder.run(plan, request.options, **how)


# -- after the answer ------------------------------------------------------------------------------

KEPT_REPORTS = 256
"""Answered requests whose reports are kept."""

MAX_KEEPING = 8
"""Requests that may wait for their caches to be copied, or chunks to be observed; others are dropped."""

MIN_WAIT = 1.0
"""Seconds that a request waits at least for rows of an earlier one, if it must."""

POLL = 0.05
"""Seconds after which such a request looks whether it was cancelled."""


@dataclass(frozen=True, eq=False)
class _Pending:
    """A request whose rows are being stored: the chunks among them, and the first steps new in the tree.

    Others wait until ``until`` (:func:`time.monotonic`): as long as its prefill took. Computing the rows
    again is quicker than a longer wait.
    """

    generated: Generated
    namespace: str
    chunks: frozenset[Ids]
    steps: tuple[Step, ...]
    until: float

    def has_rows_of(self, request: PromptRequest) -> bool:
        """Whether the request has one of the chunks, or begins as this one does."""
        path = request.place[1] if request.place is not None else ()
        begins_alike = bool(self.steps) and path[: len(self.steps)] == self.steps
        return begins_alike or not _chunks(request).isdisjoint(self.chunks)


class AfterAnswer:
    """Follows up each answered request; ``registering`` is held while a forget ends.

    Nothing is stored once the model has changed, nor what was forgotten meanwhile.
    """

    def __init__(self, components: EngineComponents, cold: str, registering: Lock) -> None:
        self._parts, self.cold, self._registering = components, cold, registering
        self.reports = deque[GenerateReport](maxlen=KEPT_REPORTS)
        self._jobs = components.background.queue(self._keep_pending, MAX_KEEPING)
        self._saving = components.background.queue(VariantPool.save, 1)
        backoff = partial(Backoff, components.active)
        self._observing = components.background.queue(self._observe, MAX_KEEPING, backoff)
        self._changed = Condition()
        self._pending: tuple[_Pending, ...] = ()
        self._can_observe = True

    @property
    def captures(self) -> bool:
        """Whether rows of missing chunks are observed, to be stored as the prompt computes them."""
        return self.cold != "never"

    def submit(self, generated: Generated, request: Request, kept: Kept | None, begun: float) -> int:
        """Use what an answered request produced: timings, exact rows, missing chunks, its prompt.

        ``kept`` is what :meth:`keep_early` returned for it, if that was called. It was ``begun`` at that time
        of :func:`time.perf_counter`. Returns how many of its tokens are kept.
        """
        plan, parts = generated.plan, self._parts
        parts.planner.retain(request.prompt)
        if generated.token_ids:  # else cancelled before the first token
            with CancelScope(request.ended):
                if parts.shadow is not None:
                    parts.shadow.follow(request.prompt, generated.report)
                if parts.loads is not None:
                    parts.loads.follow(plan.skipped, plan.report.loaded_bytes)
                if parts.cost.needed:
                    parts.cost.measure_later()
                kept = kept or self.keep(generated)
                self.encode_missing(plan.missing, kept.keys)
                self._observe_later(request.prompt, plan.observable)
        if parts.planner.variants.saved is not None:
            self._saving.add(parts.planner.variants)
        if plan.report.namespace in parts.auto.used:
            attempt(self._feed_auto, generated, begun)
        return kept.tokens if kept else 0

    def encode_missing(self, missed: Iterable[Missing], kept: frozenset[KVKey] = frozenset()) -> None:
        """Count what a request missed, and encode it, now or later, but for what was kept."""
        encoder, missed = self._parts.background_encoder, tuple(missed)
        if not missed:
            return
        encoder.count(missed_tokens=sum(len(item.token_ids) for item in missed))
        missing = [item for item in missed if item.key not in kept]
        if self.cold == "background":
            encoder.later(missing)
        elif self.cold == "now":
            attempt(encoder.now, missing)

    def _observe_later(self, prompt: PromptRequest, items: tuple[Missing, ...]) -> None:
        """Have rows of found chunks computed in this prompt, too, for means of too few contexts."""
        if not (items and self.captures and self._can_observe):
            return
        # From its chunks alone: as a turn the tree may have all of it by now.
        job = replace(prompt, policy=open_policy("reuse"), place=None), items
        if self.cold == "now":
            attempt(self._observe, job)
        else:
            self._observing.add(job)

    def _observe(self, job: tuple[PromptRequest, tuple[Missing, ...]]) -> None:
        parts, (prompt, items) = self._parts, job
        encoder, planner = parts.background_encoder, parts.planner
        due = items if self.cold == "now" else encoder.due(items, more=1)  # less urgent than a missing chunk
        if not due or not planner.unchanged():
            return
        request = planner.look_up(replace(prompt, observes=frozenset(item.key for item in due)))
        entries = observe(parts.model, parts.rope, planner.plan(request), planner.plan)
        self._can_observe &= entries is not None
        if entries and planner.unchanged():
            encoder.keep(entries, "encoded_tokens")

    def _feed_auto(self, generated: Generated, begun: float) -> None:
        # Planning and waits for slow tiers are part of what reuse costs.
        plan, seconds = generated.plan, generated.first_token - begun if generated.token_ids else None
        with self._registering:  # no forget ends meanwhile
            # Of another epoch it may hold a forgotten chunk.
            if plan.request is None or self._parts.rope.why_not_linked(len(plan.token_ids)):
                return
            if plan.request.epoch == self._parts.forgets.epoch:
                in_background = self.cold == "background"
                self._parts.auto.follow(plan.request, in_background, len(plan.rows), seconds)

    # -- exact rows --------------------------------------------------------------------------------

    def keep_early(self, generated: Generated) -> Kept | None:
        """As :meth:`keep`, while the answer goes on; None where rows of the answer are to be kept, too."""
        tree = self._parts.tree
        return None if tree is not None and tree.turns.budget else self.keep(generated)

    def keep(self, generated: Generated) -> Kept:
        """Store copies of a request's rows, now or later; returns what they are."""
        own = self._own(generated)
        if self._parts.tree is None and not own:
            return Kept()
        kept = Kept(frozenset(item.key for item in own), self._written(generated, own))
        if self.cold == "now":
            self._keep(generated)
        elif not self._keep_later(generated, own):
            return Kept()
        return kept

    def awaits(self, request: PromptRequest) -> bool:
        """Whether rows that are being stored would be reused by a request, which waits for them."""
        if not self._pending or not request.reads_cache or self._parts.background.closed.is_set():
            return False
        now, namespace = monotonic(), request.namespace
        return any(
            one.namespace == namespace and now < one.until and one.has_rows_of(request)
            for one in self._pending
        )

    def wait(self, request: PromptRequest) -> float:
        """Wait while a request :meth:`awaits` rows; returns the seconds. Cancelled in a cancelled scope."""
        if not self._pending:
            return 0.0
        started_at = monotonic()
        while self.awaits(request):
            raise_if_cancelled()
            self._changed.wait_for(lambda: not self.awaits(request), POLL)
        return monotonic() - started_at

    def _own(self, generated: Generated) -> tuple[Missing, ...]:
        own = generated.own
        return own.items if own is not None and own.complete(generated.cache) else ()

    def _written(self, generated: Generated, own: Iterable[Missing]) -> int:
        """How many rows of the prompt that were not cached are in its own entries, the tree or a turn."""
        plan, rope, tree = generated.plan, self._parts.rope, self._parts.tree
        written = np.zeros(len(plan.token_ids), dtype=bool)
        for item in own:
            written[len(item.encoding.before) : stop_of(item)] = True
        match = None if tree is None else with_answer(plan, generated.token_ids, rope)
        if tree is not None and match is not None:
            for at in stretches_of(plan, match, generated.cache, rope, generated.snapshots):
                written[at.start : at.stop] = True
            if keeps_turn(plan, generated.token_ids, generated.cache, rope, tree.turns.budget):
                written[:] = True
        for chunk in plan.placed:
            written[chunk.start : chunk.stop] = False
        return int(written.sum())

    def _keep_later(self, generated: Generated, own: Iterable[Missing]) -> bool:
        plan, tree = generated.plan, self._parts.tree
        assert plan.request is not None, "planned from a prompt"
        chunks = frozenset(item.token_ids for item in own)
        steps: tuple[Step, ...] = ()
        if tree is not None and plan.prefix_match is not None:
            match = plan.prefix_match.held or plan.prefix_match.match
            if tree.turns.budget or len(match) < len(match.path):
                steps = match.path[: len(match) + 1]
        until = monotonic() + max(MIN_WAIT, generated.first_token - generated.linked)
        pending = _Pending(generated, plan.request.namespace, chunks, steps, until)
        with self._changed:
            self._pending = (*self._pending, pending)
        queued = self._jobs.add(pending)
        if not queued:
            self._discard(pending)
        return queued

    def _keep_pending(self, pending: _Pending) -> None:
        try:
            self._keep(pending.generated)
        finally:
            self._discard(pending)

    def _discard(self, pending: _Pending) -> None:
        with self._changed:
            self._pending = tuple(other for other in self._pending if other is not pending)
            self._changed.notify_all()

    def _keep(self, generated: Generated) -> None:
        if self._parts.planner.unchanged():
            attempt(self._keep_in_tree, generated)
            attempt(self._keep_own, generated)

    def _keep_own(self, generated: Generated) -> None:
        if self._own(generated) and generated.own is not None:
            entries = generated.own.entries(generated.cache, self._parts.rope)
            self._parts.background_encoder.keep(entries)

    def _keep_in_tree(self, generated: Generated) -> None:
        plan, rope, tree = generated.plan, self._parts.rope, self._parts.tree
        match = with_answer(plan, generated.token_ids, rope)
        if tree is None or plan.prefix_match is None or match is None:
            return
        taken, storing = generated.snapshots, self._parts.forgets.storing_in_tree
        kvs = captured(plan, match, generated.cache, rope, taken)
        with storing:
            if not self._forgot(generated, plan.prefix_match.members):
                tree.insert(match, kvs, new=len(plan.token_ids) - plan.prefix_match.tokens)
        if not tree.turns.budget:
            return
        turn = turn_of(plan, generated.token_ids, generated.cache, rope, tree.turns.budget)
        with storing:
            if turn is not None and not self._forgot(generated, turn.members):
                tree.turns.keep(turn, plan.prefix_match.epoch)

    def _forgot(self, generated: Generated, chunk_ids: Iterable[str]) -> bool:
        request, forgets = generated.plan.request, self._parts.forgets
        assert request is not None, "planned from a prompt"
        ids = (*generated.plan.token_ids, *generated.token_ids)
        return forgets.forgot_any(request.namespace, chunk_ids, request.epoch) or forgets.forgot_within(
            request.namespace, ids, request.epoch
        )


def _chunks(request: PromptRequest) -> frozenset[Ids]:
    return frozenset(segment.token_ids for segment in request.segments if segment.is_chunk)
