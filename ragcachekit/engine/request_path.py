"""The way of every request, queued or not: its plan, and after generation the answer and what follows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event, Lock
from typing import Any

from ragcachekit.background import attempt
from ragcachekit.cancellation import CancelScope
from ragcachekit.engine.components import EngineComponents
from ragcachekit.generate.hooks import FirstScores
from ragcachekit.generate.run import Generated
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.plan.request import PromptRequest
from ragcachekit.prompt.parser import PromptLike, Tools
from ragcachekit.quality.budget import ResolvedPolicy
from ragcachekit.reports import Answer, GenerateReport
from ragcachekit.store.base import NullStore
from ragcachekit.types import KVKey

NOT_KEPT = (
    "could not be kept, as the store is too small, full or failing (failed_writes in stats() says where)"
)

TOLD = 0.01  # seconds of waiting that a report mentions

REPORTS = 256
"""Answered requests whose reports are kept."""


@dataclass(frozen=True, eq=False)
class Asked:
    """What a call asks for beside its prompt: complete ``options`` of generate, stop strings, an event."""

    options: Mapping[str, Any]
    stop: Sequence[str]
    cancel: Event | None


class RequestPath:
    """The steps of one engine's requests; ``registering`` is held while a forget ends.

    ``cold`` is that of :class:`ragcachekit.RagCache`.
    """

    def __init__(self, components: EngineComponents, cold: str, registering: Lock) -> None:
        self._components, self.cold, self._registering = components, cold, registering
        self.reports = deque[GenerateReport](maxlen=REPORTS)

    @property
    def own(self) -> bool:
        """Whether rows of missing chunks are observed, to be stored as the prompt computes them."""
        return self.cold != "never"

    def request(
        self, prompt: PromptLike, namespace: str, chosen: ResolvedPolicy, tools: Tools | None = None
    ) -> PromptRequest:
        """The prompt, tokenised; its entries are looked up by :meth:`looked_up`."""
        epoch = self._components.forgets.now()
        parsed = self._components.parser.parse(prompt, namespace, tools)
        request = self._components.planner.prepare(parsed, chosen.policy, epoch)
        return replace(
            request,
            label=chosen.label,
            notes=(*request.notes, *chosen.notes),
            fallback=request.fallback or chosen.fallback,
        )

    def begin(self, request: PromptRequest) -> LinkPlan:
        """The plan of a request, by what is cached now, once an earlier prompt's rows are stored."""
        waited = self._components.capture.pending.wait(request)
        if waited >= TOLD:
            note = f"waited {waited:.2f} s until rows of an earlier prompt were stored"
            request = replace(request, notes=(*request.notes, note))
        begun = time.perf_counter()
        return _since(begun, self.plan(self._components.planner.look_up(request)))

    def plan(self, request: PromptRequest, without: frozenset[KVKey] = frozenset()) -> LinkPlan:
        """The plan of a request whose look-ups have begun; also a :data:`.Replan`."""
        begun = time.perf_counter()
        plan = self._components.planner.plan(request, without)
        note = self._not_kept(plan.missing)
        return _since(begun, plan if note is None else plan.with_note(note))

    def finish(
        self,
        generated: Generated,
        asked: Asked,
        first: FirstScores | None,
        begun: float,
        captured: frozenset[KVKey] | None = None,
    ) -> Answer:
        """The answer, once shadow mode and the caches have followed.

        ``begun`` as for ``answer``, ``captured`` as for :meth:`follow_up`.
        """
        parts = self._components
        answer = parts.generator.answer(generated, begun, asked.options, asked.stop)
        if generated.token_ids:  # else cancelled before the first token
            with CancelScope(asked.cancel):
                parts.shadow.follow(generated.plan, answer, first, asked.options, asked.stop)
                self.follow_up(generated, captured)
        return answer

    def capture(self, generated: Generated) -> frozenset[KVKey] | None:
        """Store exact rows of a prompt while its answer goes on, for requests that wait.

        Returns the keys that need no encoding any more; None where rows of the answer are captured, too.
        """
        tree = self._components.tree
        has_turns = tree is not None and tree.turns.budget
        return None if has_turns else self._components.capture.after(generated)

    def follow_up(self, generated: Generated, captured: frozenset[KVKey] | None = None) -> None:
        """Use what an answered request produced: timings, exact rows, and missing chunks to encode.

        ``captured`` is what :meth:`capture` returned for it, if it was called.
        """
        self._components.loads.learn(generated)
        if captured is None:
            captured = self._components.capture.after(generated)
        self.encode_missing(generated.plan.missing, captured)

    def check_auto(self, plan: LinkPlan) -> None:
        """Note an answered prompt for the check of ``auto``; errors are logged."""
        attempt(self._check_auto, plan)

    def _check_auto(self, plan: LinkPlan) -> None:
        parts, request = self._components, plan.request
        with self._registering:  # no forget ends meanwhile
            # Of another epoch it may hold a forgotten chunk.
            if request is not None and request.epoch == parts.forgets.now():
                parts.auto.follow(request, self.cold == "background")

    def encode_missing(self, missed: Iterable[Missing], captured: frozenset[KVKey] = frozenset()) -> None:
        """Count what a request missed, and encode it, now or later, but for what was captured."""
        encoder, missed = self._components.background_encoder, list(missed)
        encoder.count(missed_tokens=sum(len(item.token_ids) for item in missed))
        missing = [item for item in missed if item.key not in captured]
        if self.cold == "background":
            encoder.later(missing)
        elif self.cold == "now":
            attempt(encoder.now, missing)

    def _not_kept(self, missing: Sequence[Missing]) -> str | None:
        """A note for the report if the store could not keep missing entries before."""
        lost = self._components.background_encoder.refused(item.key for item in missing)
        if not lost or isinstance(self._components.store, NullStore):
            return None
        return f"{lost} missing entr{'ies' if lost > 1 else 'y'} {NOT_KEPT}"


def _since(begun: float, plan: LinkPlan) -> LinkPlan:
    """The plan, whose report says how long it took; ``begun`` in seconds of :func:`time.perf_counter`."""
    return replace(plan, report=replace(plan.report, plan_ms=(time.perf_counter() - begun) * 1e3))
