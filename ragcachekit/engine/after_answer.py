"""What follows an answer: exact rows are kept, missing chunks encoded, shadow mode and ``auto`` fed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Event, Lock

from ragcachekit.background import attempt
from ragcachekit.cancellation import CancelScope, raise_if_cancelled
from ragcachekit.engine.components import EngineComponents
from ragcachekit.engine.request import GenerateCall
from ragcachekit.forward.rows import captured, turn_of, with_answer
from ragcachekit.generate.run import FirstScores, Generated
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.plan.request import PromptRequest
from ragcachekit.prefix_tree.base import Match
from ragcachekit.reports import Answer, GenerateReport
from ragcachekit.threads import Condition
from ragcachekit.types import ENCODING_PREFIX, Ids, KVKey

KEPT_REPORTS = 256
"""Answered requests whose reports are kept."""


class AfterAnswer:
    """Follows up each answered request; ``registering`` is held while a forget ends.

    ``cold`` is that of :class:`ragcachekit.RagCache`.
    """

    def __init__(self, components: EngineComponents, cold: str, registering: Lock) -> None:
        self._parts, self.cold, self._registering = components, cold, registering
        self.rows = RowCapture(components, at_once=cold == "now")
        self.pending = self.rows.pending
        self.reports = deque[GenerateReport](maxlen=KEPT_REPORTS)

    @property
    def captures(self) -> bool:
        """Whether rows of missing chunks are observed, to be stored as the prompt computes them."""
        return self.cold != "never"

    def submit(
        self,
        generated: Generated,
        answer: Answer,
        call: GenerateCall,
        first: FirstScores | None,
        captured: frozenset[KVKey] | None = None,
    ) -> None:
        """Use what an answered request produced: timings, exact rows, missing chunks, its prompt.

        ``captured`` is what :meth:`capture` returned for it, if that was called; ``first`` what shadow mode
        drew.
        """
        if generated.token_ids:  # else cancelled before the first token
            with CancelScope(call.cancel):
                self._parts.shadow.follow(generated.plan, answer, first, call.options, call.stop)
                self.follow_up(generated, captured)
        attempt(self._feed_auto, generated.plan)

    def follow_up(self, generated: Generated, captured: frozenset[KVKey] | None = None) -> None:
        """Use the timings, exact rows and missing chunks of an answered request."""
        plan, loads = generated.plan, self._parts.loads
        if loads.planner is not None and generated.prefill is not None:
            loads.planner.observe_prefill(plan.kept, len(plan.rows), generated.prefill)
        loads.follow(plan.skipped, plan.report.loaded_bytes)
        if captured is None:
            captured = self.rows.after(generated)
        self.encode_missing(generated.plan.missing, captured)

    def capture(self, generated: Generated) -> frozenset[KVKey] | None:
        """Store exact rows of a prompt while its answer goes on, for requests that wait.

        Returns the keys that need no encoding any more; None where rows of the answer are captured, too.
        """
        tree = self._parts.tree
        has_turns = tree is not None and tree.turns.budget
        return None if has_turns else self.rows.after(generated)

    def encode_missing(self, missed: Iterable[Missing], captured: frozenset[KVKey] = frozenset()) -> None:
        """Count what a request missed, and encode it, now or later, but for what was captured."""
        encoder, missed = self._parts.background_encoder, list(missed)
        encoder.count(missed_tokens=sum(len(item.token_ids) for item in missed))
        missing = [item for item in missed if item.key not in captured]
        if self.cold == "background":
            encoder.later(missing)
        elif self.cold == "now":
            attempt(encoder.now, missing)

    def _feed_auto(self, plan: LinkPlan) -> None:
        with self._registering:  # no forget ends meanwhile
            # Of another epoch it may hold a forgotten chunk.
            if plan.request is not None and plan.request.epoch == self._parts.forgets.now():
                self._parts.auto.follow(plan.request, self.cold == "background")


# -- exact rows ----------------------------------------------------------------------------------

POLL = 0.05
"""Seconds after which a waiting request looks whether it was cancelled."""

MIN_WAIT = 1.0
"""Seconds that a request waits at least, if it must: threads have to start, and processors may be busy."""


@dataclass(frozen=True, eq=False)
class Pending:
    """What of one prompt is being stored: chunks by their ids, and beginnings that others may repeat.

    Others wait until ``until``, in seconds of :func:`time.monotonic`.
    """

    namespace: str
    chunks: frozenset[str]
    beginnings: tuple[Ids, ...]
    until: float

    @classmethod
    def of(cls, generated: Generated, turns: bool) -> Pending:
        """What is stored of a request, its first text aside; with ``turns`` also its turn.

        Waiting may take as long as its prefill did, or :data:`MIN_WAIT`; longer than that,
        computing the rows again would be quicker.
        """
        plan, own, chunks = generated.plan, generated.own, frozenset[str]()
        if own is not None and own.complete(generated.cache):
            items = [item for item in own.items if item.encoding.name != ENCODING_PREFIX]
            chunks = frozenset(item.key.chunk_id for item in items)
        beginnings = [plan.token_ids] if turns else []
        if plan.prefix_match is not None and (stop := _first_new(plan.prefix_match.match)):
            beginnings.append(plan.token_ids[:stop])
        namespace = plan.request.namespace if plan.request is not None else ""
        until = time.monotonic() + max(MIN_WAIT, generated.prefill or 0.0)
        return cls(namespace, chunks, tuple(beginnings), until)

    def concerns(self, request: PromptRequest, chunks: frozenset[str]) -> bool:
        """Whether a request with these chunks would reuse some of this."""
        if time.monotonic() >= self.until:
            return False
        ids = request.token_ids if self.beginnings else ()
        return any(ids[: len(b)] == b for b in self.beginnings) or not chunks.isdisjoint(self.chunks)


def _first_new(match: Match) -> int:
    """Where the first step ends that the tree did not have; the text before a first chunk does not count."""
    documents = [step.document for step in match.path]
    number = max(len(match), documents.index(True) if True in documents else 0)
    return sum(step.tokens for step in match.path[: number + 1]) if number < len(match.path) else 0


class PendingRows:
    """The segments that are being stored; nobody waits once ``closed`` is set. Thread safe."""

    def __init__(self, closed: Event) -> None:
        self._closed, self._changed = closed, Condition()
        self._pending: tuple[Pending, ...] = ()

    def add(self, pending: Pending) -> None:
        """Let requests wait for these segments."""
        with self._changed:
            self._pending = (*self._pending, pending)

    def discard(self, pending: Pending) -> None:
        """Wake the requests that wait for these: they are stored, or will not be."""
        with self._changed:
            self._pending = tuple(other for other in self._pending if other is not pending)
            self._changed.notify_all()

    def concern(self, request: PromptRequest) -> bool:
        """Whether one of the segments would be reused by the request."""
        if not self._pending or not request.reads_cache or self._closed.is_set():
            return False
        own = [pending for pending in self._pending if pending.namespace == request.namespace]
        chunks = frozenset(want.key.chunk_id for want in request.reusable)
        return any(pending.concerns(request, chunks) for pending in own)

    def wait(self, request: PromptRequest) -> float:
        """Wait while segments :meth:`concern` the request; returns the seconds.

        Raises
        ------
        Cancelled
            In a cancelled scope.
        """
        begun = time.monotonic()
        while self.concern(request):
            raise_if_cancelled()
            self._changed.wait_for(lambda: not self.concern(request), POLL)
        return time.monotonic() - begun


MAX_WAITING = 8  # requests whose caches may wait to be copied from

_Job = tuple[Generated, Pending]


class RowCapture:
    """Copies rows out of the caches of answered requests, without a forward.

    ``at_once``: before the answer is returned, not in the background. Nothing is stored once the model has
    changed, nor what was forgotten since the request came.
    """

    def __init__(self, components: EngineComponents, at_once: bool) -> None:
        parts = components
        self.tree, self._encoder, self._forgets = parts.tree, parts.background_encoder, parts.forgets
        self._rope, self._unchanged = parts.rope, parts.planner.unchanged
        self._at_once, self._jobs = at_once, parts.background.queue(self._work, MAX_WAITING)
        self.pending = PendingRows(parts.background.closed)

    def after(self, generated: Generated) -> frozenset[KVKey]:
        """Capture rows of a request; returns the keys that need no encoding any more.

        What comes while :data:`MAX_WAITING` requests wait is dropped: it can be computed again.
        """
        own = generated.own
        complete = own is not None and own.complete(generated.cache)
        if self.tree is None and not complete:
            return frozenset()
        if self._at_once:
            self._keep(generated)
        elif not self._submit(generated):
            return frozenset()
        return frozenset(item.key for item in own.items) if own is not None and complete else frozenset()

    def _submit(self, generated: Generated) -> bool:
        turns = self.tree is not None and self.tree.turns.budget > 0
        pending, queued = Pending.of(generated, turns), False
        self.pending.add(pending)
        try:
            queued = self._jobs.submit((generated, pending))
        finally:  # also after an interrupt
            if not queued:
                self.pending.discard(pending)
        return queued

    def _work(self, job: _Job) -> None:
        try:
            self._keep(job[0])
        finally:
            self.pending.discard(job[1])

    def _keep(self, generated: Generated) -> None:
        if self._unchanged():
            attempt(self._keep_exact, generated)
            attempt(self._keep_own, generated)

    def _keep_own(self, generated: Generated) -> None:
        own = generated.own
        if own is not None and own.complete(generated.cache):
            self._encoder.keep(own.entries(generated.cache, self._rope))

    def _keep_exact(self, generated: Generated) -> None:
        plan = generated.plan
        match = with_answer(plan, generated.token_ids, self._rope)
        if self.tree is None or plan.prefix_match is None or match is None:
            return
        kvs = captured(plan, match, generated.cache, self._rope)
        new = len(plan.token_ids) - plan.prefix_match.tokens
        with self._forgets.storing_in_tree:
            if not self._forgot(generated, plan.prefix_match.members):
                self.tree.insert(match, kvs, new=new)
        turns = self.tree.turns
        if not turns.budget:
            return
        turn = turn_of(plan, generated.token_ids, generated.cache, self._rope, turns.budget)
        if turn is None:
            return
        with self._forgets.storing_in_tree:
            if not self._forgot(generated, turn.members):
                turns.keep(turn, plan.prefix_match.epoch)

    def _forgot(self, generated: Generated, chunk_ids: Iterable[str]) -> bool:
        request, forgets = generated.plan.request, self._forgets
        assert request is not None
        ids = (*generated.plan.token_ids, *generated.token_ids)
        return forgets.forgot_any(request.namespace, chunk_ids, request.epoch) or forgets.forgot_within(
            request.namespace, ids, request.epoch
        )
