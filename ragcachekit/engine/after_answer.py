"""What follows an answer: exact rows are kept, missing chunks encoded, shadow mode and ``auto`` fed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import Lock

from ragcachekit.background import attempt
from ragcachekit.cancellation import CancelScope
from ragcachekit.engine.components import EngineComponents
from ragcachekit.engine.request import GenerateCall
from ragcachekit.generate.hooks import FirstScores
from ragcachekit.generate.run import Generated
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.reports import Answer, GenerateReport
from ragcachekit.types import KVKey

KEPT_REPORTS = 256
"""Answered requests whose reports are kept."""


class AfterAnswer:
    """Follows up each answered request; ``registering`` is held while a forget ends.

    ``cold`` is that of :class:`ragcachekit.RagCache`.
    """

    def __init__(self, components: EngineComponents, cold: str, registering: Lock) -> None:
        self._parts, self.cold, self._registering = components, cold, registering
        self.pending = components.capture.pending
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
        self._parts.loads.learn(generated)
        if captured is None:
            captured = self._parts.capture.after(generated)
        self.encode_missing(generated.plan.missing, captured)

    def capture(self, generated: Generated) -> frozenset[KVKey] | None:
        """Store exact rows of a prompt while its answer goes on, for requests that wait.

        Returns the keys that need no encoding any more; None where rows of the answer are captured, too.
        """
        tree = self._parts.tree
        has_turns = tree is not None and tree.turns.budget
        return None if has_turns else self._parts.capture.after(generated)

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
