"""Copies of what a request computed exactly, out of its cache into the knowledge tree and the chunk store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from ragcachekit.background import Background, attempt
from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.engine.capture.pending_rows import Pending, PendingRows
from ragcachekit.forward.own_rows import captured, turn_of, with_answer
from ragcachekit.generate.run import Generated
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.forgets import ForgetEpochs
from ragcachekit.types import KVKey

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
        if self.tree is None or plan.beginning is None or match is None:
            return
        kvs = captured(plan, match, generated.cache, self._rope)
        new = len(plan.token_ids) - plan.beginning.tokens
        with self._forgets.storing_in_tree:
            if not self._forgot(generated, plan.beginning.members):
                self.tree.insert(match, kvs, new=new)
        turns = self.tree.turns
        if not turns.budget:
            return
        turn = turn_of(plan, generated.token_ids, generated.cache, self._rope, turns.budget)
        if turn is None:
            return
        with self._forgets.storing_in_tree:
            if not self._forgot(generated, turn.members):
                turns.keep(turn, plan.beginning.epoch)

    def _forgot(self, generated: Generated, chunk_ids: Iterable[str]) -> bool:
        request, forgets = generated.plan.request, self._forgets
        assert request is not None
        ids = (*generated.plan.token_ids, *generated.token_ids)
        return forgets.forgot_any(request.namespace, chunk_ids, request.epoch) or forgets.forgot_within(
            request.namespace, ids, request.epoch
        )
