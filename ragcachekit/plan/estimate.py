"""What a waiting prompt would reuse, by the keys that are in memory: no tensor is read, no access counted."""

from __future__ import annotations

import logging

from ragcachekit.plan.prefix_match import PrefixMatcher
from ragcachekit.plan.request import PromptRequest
from ragcachekit.plan.variants import VariantPool, keys_for
from ragcachekit.store.base import KVStore
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)


class Estimator:
    """Estimates for one request that was not looked up yet.

    Entries in slow tiers count as not cached. Tokens that a policy recomputes count as cached.
    """

    def __init__(
        self,
        request: PromptRequest,
        store: KVStore,
        variants: VariantPool,
        fingerprint: str,
        tree: PrefixMatcher | None,
    ) -> None:
        self.tokens = sum(len(segment.token_ids) for segment in request.segments)
        self._store, self._variants, self._tree = store, variants, tree
        self._place = (
            tree.place(request.segments, request.wanted, fingerprint, request.namespace)
            if tree and request.reads_cache
            else None
        )
        self._wanted = request.reusable

    def rows(self) -> tuple[int, int]:
        """Prompt tokens with cached KV, and the others, at least one."""
        known = self._tree.tree.known(*self._place) if self._tree and self._place else 0
        cached = known + sum(
            len(want.token_ids)
            for want in self._wanted
            if want.start >= known and any(map(self._in_memory, keys_for(want, self._variants)))
        )
        return cached, max(1, self.tokens - cached)

    def to_load(self) -> list[KVKey]:
        """Keys to look up in slow tiers."""
        every = [keys_for(want, self._variants) for want in self._wanted]
        return [key for keys in every if not any(map(self._in_memory, keys)) for key in keys]

    def _in_memory(self, key: KVKey) -> bool:
        try:
            return self._store.in_memory(key)
        except Exception:  # a user's own store
            log.warning("a store could not say what is in memory", exc_info=True)
            return False
