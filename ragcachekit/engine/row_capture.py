"""Copies of what a request computed exactly, out of its cache into the knowledge tree and the chunk store.

The next prompt with the same chunks waits for rows that are being stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Event
from typing import Literal

from ragcachekit.background import Background, attempt
from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.forward.own_rows import captured, turn_of, with_answer
from ragcachekit.generate.run import Generated
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.request import PromptRequest
from ragcachekit.prefix_tree.base import Match
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.forgets import ForgetEpochs
from ragcachekit.threads import Condition
from ragcachekit.types import ENCODING_PREFIX, Ids, KVKey

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

    ``when``: in a thread, or before the answer is returned. Nothing is stored once the model has changed
    (``unchanged``), nor what ``forgets`` dropped since the request came.
    """

    def __init__(
        self,
        tree: KnowledgeTree | None,
        background_encoder: BackgroundEncoder,
        rope: Rope,
        unchanged: Callable[[], bool],
        forgets: ForgetEpochs,
        when: Literal["background", "now"],
    ) -> None:
        self.tree, self._encoder, self._rope = tree, background_encoder, rope
        self._unchanged, self._forgets, self._when = unchanged, forgets, when
        self._background = Background[_Job](self._work, MAX_WAITING, "ragcachekit-capture")
        self.pending = PendingRows(self._background.closed)
        self.flush, self.close = self._background.flush, self._background.close

    def after(self, generated: Generated) -> frozenset[KVKey]:
        """Capture rows of a request; returns the keys that need no encoding any more.

        What comes while :data:`MAX_WAITING` requests wait is dropped: it can be computed again.
        """
        own = generated.own
        complete = own is not None and own.complete(generated.cache)
        if self.tree is None and not complete:
            return frozenset()
        if self._when == "now":
            self._keep(generated)
        elif not self._submit(generated):
            return frozenset()
        return frozenset(item.key for item in own.items) if own is not None and complete else frozenset()

    def _submit(self, generated: Generated) -> bool:
        turns = self.tree is not None and self.tree.turns.budget > 0
        pending, queued = Pending.of(generated, turns), False
        self.pending.add(pending)
        try:
            queued = self._background.submit((generated, pending))
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
