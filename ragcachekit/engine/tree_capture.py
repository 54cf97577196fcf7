"""Behind the answer: what a request computed exactly goes into the knowledge tree and the chunk store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from ragcachekit.background import Background, attempt
from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.forward.own_rows import captured, turn_of
from ragcachekit.generate.run import Generated
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.forget_epochs import ForgetEpochs
from ragcachekit.types import KVKey

MOST_WAITING = 8
"""Requests whose caches may wait to be copied from; each holds its cache until then."""


class OwnRowsKeeper:
    """Copies what requests computed of their missing chunks out of their caches. Costs no forward.

    Parameters
    ----------
    background_encoder : BackgroundEncoder
        Stores it.
    rope : Rope
    unchanged, when
        As for :class:`TreeKeeper`.
    """

    def __init__(
        self,
        background_encoder: BackgroundEncoder,
        rope: Rope,
        unchanged: Callable[[], bool],
        when: Literal["background", "now"] = "background",
    ) -> None:
        self._warmer, self._rope, self._unchanged, self._when = background_encoder, rope, unchanged, when
        self._background = Background[Generated](self._keep, MOST_WAITING, "ragcachekit-own-rows")

    def after(self, generated: Generated) -> frozenset[KVKey]:
        """A request is done; keys of what is, or will be, taken from it. The others have to be encoded."""
        own = generated.own
        if own is None or not own.complete(generated.cache):
            return frozenset()
        if self._when == "now":
            attempt(self._keep, generated)
        elif not self._background.submit(generated):
            return frozenset()
        return frozenset(item.key for item in own.items)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits; False if ``timeout`` seconds did not suffice."""
        return self._background.flush(timeout)

    def close(self) -> None:
        """End the thread."""
        self._background.close()

    def _keep(self, generated: Generated) -> None:
        if generated.own is not None and self._unchanged():
            self._warmer.keep(generated.own.entries(generated.cache, self._rope))


class TreeKeeper:
    """Copies exact rows out of the caches of answered requests. Costs no forward.

    Nothing is kept once ``unchanged`` says that the model is another one, nor what ``forgets`` says was
    forgotten since its request came. ``when``: in a thread, or before the answer is returned.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        rope: Rope,
        unchanged: Callable[[], bool],
        forgets: ForgetEpochs,
        when: Literal["background", "now"] = "background",
    ) -> None:
        self.tree = tree
        self._rope = rope
        self._unchanged = unchanged
        self._forgets = forgets
        self._when = when
        self._background = Background[Generated](self._keep, MOST_WAITING, "ragcachekit-tree")

    def after(self, generated: Generated) -> None:
        """A batch of requests is done. What comes while many wait is dropped: it may be computed again."""
        if self._when == "now":
            attempt(self._keep, generated)
        else:
            self._background.submit(generated)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits; False if ``timeout`` seconds did not suffice."""
        return self._background.flush(timeout)

    def close(self) -> None:
        """End the thread; the tree stays open."""
        self._background.close()

    def _keep(self, generated: Generated) -> None:
        if not self._unchanged():
            return
        for item, plan in enumerate(generated.plans):
            if plan.beginning is None:
                continue
            offset = generated.width - len(plan.token_ids)
            kvs = captured(plan, generated.cache, item, offset, self._rope)
            new = len(plan.token_ids) - plan.beginning.tokens
            with self._forgets.storing_in_tree():
                if not self._forgot(plan, plan.beginning.members):
                    self.tree.insert(plan.beginning.match, kvs, new=new)
            self._keep_turn(generated, item, offset)

    def _keep_turn(self, generated: Generated, item: int, offset: int) -> None:
        plan, turns = generated.plans[item], self.tree.turns
        if not turns.budget or plan.beginning is None:
            return
        answer = generated.token_ids[item]
        turn = turn_of(plan, answer, generated.cache, item, offset, self._rope, turns.budget)
        if turn is None:
            return
        with self._forgets.storing_in_tree():
            if not self._forgot(plan, turn.members):
                turns.keep(turn, plan.beginning.epoch)

    def _forgot(self, plan: LinkPlan, chunk_ids: Iterable[str]) -> bool:
        assert plan.request is not None
        return self._forgets.forgot_any(plan.request.namespace, chunk_ids, plan.request.epoch)
