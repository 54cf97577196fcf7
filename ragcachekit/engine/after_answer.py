"""What follows an answer: exact rows are kept, missing chunks encoded, shadow mode and ``auto`` fed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock

from ragcachekit.cancellation import CancelScope, raise_if_cancelled
from ragcachekit.engine.components import EngineComponents
from ragcachekit.engine.request import GenerateCall
from ragcachekit.forward.rows import captured, turn_of, with_answer
from ragcachekit.generate.run import FirstScores, Generated
from ragcachekit.plan.link_plan import LinkPlan, Missing, PromptRequest
from ragcachekit.reports import Answer, GenerateReport
from ragcachekit.threads import Condition, attempt
from ragcachekit.types import Ids, KVKey

KEPT_REPORTS = 256
"""Answered requests whose reports are kept."""

MAX_KEEPING = 8
"""Requests whose caches may wait to be copied from; further ones are dropped."""

MIN_WAIT = 1.0
"""Seconds that a request waits at least for rows of an earlier one, if it must."""

POLL = 0.05
"""Seconds after which such a request looks whether it was cancelled."""


@dataclass(frozen=True, eq=False)
class _Pending:
    """A request whose rows are being stored, and the chunks among them.

    Others wait until ``until``, in seconds of :func:`time.monotonic`: as long as its prefill took, since
    later than that computing the rows again is quicker.
    """

    generated: Generated
    namespace: str
    chunks: frozenset[Ids]
    until: float


class AfterAnswer:
    """Follows up each answered request; ``registering`` is held while a forget ends.

    ``cold`` is that of :class:`ragcachekit.RagCache`. With "now" rows are kept before the answer is returned,
    else in the background. Nothing is stored once the model has changed, nor what was forgotten meanwhile.
    """

    def __init__(self, components: EngineComponents, cold: str, registering: Lock) -> None:
        self._parts, self.cold, self._registering = components, cold, registering
        self.reports = deque[GenerateReport](maxlen=KEPT_REPORTS)
        self._jobs = components.background.queue(self._keep_pending, MAX_KEEPING)
        self._changed = Condition()
        self._pending: tuple[_Pending, ...] = ()

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
        kept: frozenset[KVKey] | None,
    ) -> None:
        """Use what an answered request produced: timings, exact rows, missing chunks, its prompt.

        ``kept`` is what :meth:`keep_early` returned for it, if that was called; ``first`` what shadow mode
        drew.
        """
        plan = generated.plan
        if generated.token_ids:  # else cancelled before the first token
            with CancelScope(call.cancel):
                self._parts.shadow.follow(plan, answer, first, call.options, call.stop)
                if (loads := self._parts.loads) is not None:
                    timed = plan.kept, len(plan.rows), generated.prefill
                    loads.follow(*timed, plan.skipped, plan.report.loaded_bytes)
                if self._parts.cost.needed:
                    self._parts.cost.measure_later()
                self.encode_missing(plan.missing, self.keep(generated) if kept is None else kept)
        attempt(self._feed_auto, plan)

    def encode_missing(self, missed: Iterable[Missing], kept: frozenset[KVKey] = frozenset()) -> None:
        """Count what a request missed, and encode it, now or later, but for what was kept."""
        encoder, missed = self._parts.background_encoder, list(missed)
        encoder.count(missed_tokens=sum(len(item.token_ids) for item in missed))
        missing = [item for item in missed if item.key not in kept]
        if self.cold == "background":
            encoder.later(missing)
        elif self.cold == "now":
            attempt(encoder.now, missing)

    def _feed_auto(self, plan: LinkPlan) -> None:
        with self._registering:  # no forget ends meanwhile
            # Of another epoch it may hold a forgotten chunk.
            if plan.request is not None and plan.request.epoch == self._parts.forgets.now():
                self._parts.auto.follow(plan.request, self.cold == "background")

    # -- exact rows --------------------------------------------------------------------------------

    def keep_early(self, generated: Generated) -> frozenset[KVKey] | None:
        """As :meth:`keep`, while the answer goes on; None where rows of the answer are to be kept, too."""
        tree = self._parts.tree
        return None if tree is not None and tree.turns.budget else self.keep(generated)

    def keep(self, generated: Generated) -> frozenset[KVKey]:
        """Store copies of a request's rows; returns the keys that need no encoding any more."""
        own = self._own(generated)
        if self._parts.tree is None and not own:
            return frozenset()
        if self.cold == "now":
            self._keep(generated)
        elif not self._keep_later(generated, own):
            return frozenset()
        return frozenset(item.key for item in own)

    def awaits(self, request: PromptRequest) -> bool:
        """Whether rows that are being stored would be reused by a request, which waits for them."""
        if not self._pending or not request.reads_cache or self._parts.background.closed.is_set():
            return False
        chunks, now = _chunks(request), time.monotonic()
        return any(
            pending.namespace == request.namespace
            and now < pending.until
            and not chunks.isdisjoint(pending.chunks)
            for pending in self._pending
        )

    def wait(self, request: PromptRequest) -> float:
        """Wait while a request :meth:`awaits` rows; returns the seconds. Cancelled in a cancelled scope."""
        begun = time.monotonic()
        while self.awaits(request):
            raise_if_cancelled()
            self._changed.wait_for(lambda: not self.awaits(request), POLL)
        return time.monotonic() - begun

    def _own(self, generated: Generated) -> tuple[Missing, ...]:
        """The missing entries that the request's prefill computed exactly as their encoding."""
        own = generated.own
        return own.items if own is not None and own.complete(generated.cache) else ()

    def _keep_later(self, generated: Generated, own: Iterable[Missing]) -> bool:
        plan, tree = generated.plan, self._parts.tree
        assert plan.request is not None, "planned from a prompt"
        chunks = frozenset(item.token_ids for item in own)
        if tree is not None and plan.prefix_match is not None:
            match = plan.prefix_match.match
            if tree.turns.budget or len(match) < len(match.path):
                chunks |= _chunks(plan.request)
        until = time.monotonic() + max(MIN_WAIT, generated.prefill or 0.0)
        pending, queued = _Pending(generated, plan.request.namespace, chunks, until), False
        with self._changed:
            self._pending = (*self._pending, pending)
        try:
            queued = self._jobs.submit(pending)
        finally:  # also after an interrupt
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
        kvs, storing = captured(plan, match, generated.cache, rope), self._parts.forgets.storing_in_tree
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
