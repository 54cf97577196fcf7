"""One prompt with everything that belongs to the request and not to a plan, and what it would reuse."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Self

from ragcachekit.plan.encodings import Encodings, Wanted
from ragcachekit.plan.lookup import Fetch, keys_for
from ragcachekit.plan.prefix_match import PrefixMatch, PrefixMatcher
from ragcachekit.plan.variants import VariantPool
from ragcachekit.policies.base import ExactPolicy, SelectionPolicy
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.store.base import KVStore, NullStore
from ragcachekit.types import Ids, KVKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PromptRequest:
    """A segmented prompt with all that its plans need."""

    segments: tuple[TokenSegment, ...]
    policy: SelectionPolicy
    encoder: str
    namespace: str
    wanted: tuple[Wanted, ...] = ()  # cacheable segments after the prefix match
    prefix_match: PrefixMatch | None = None  # with the knowledge tree, if there is one
    fetch: Fetch = field(default_factory=lambda: Fetch(NullStore()))
    label: str = ""  # name of the policy in the report, if not its own (budget:0.05 -> lego:4)
    notes: tuple[str, ...] = ()  # for the report
    fallback: str | None = None  # reason for a prefill in full
    epoch: int = 0  # number of forgets when the prompt came
    waited_ms: float = 0.0  # by earlier plans, in vain
    texts: Mapping[Ids, str] = field(default_factory=dict)  # of its chunks, by their ids

    @classmethod
    def of(
        cls,
        segments: Sequence[TokenSegment],
        policy: SelectionPolicy,
        encodings: Encodings,
        fetch: Fetch,
        fingerprint: str,
        namespace: str,
    ) -> Self:
        """The request of a prompt whose cached rows may be used; the knowledge tree was not read."""
        wanted = tuple(encodings.wanted(segments, fingerprint, namespace))
        return cls(tuple(segments), policy, encodings.name, namespace, wanted, None, fetch)

    def looked_up(self, fetch: Fetch, fingerprint: str, tree: PrefixMatcher | None) -> Self:
        """This request as :meth:`of` made it, with the tree read now and entries looked up in ``fetch``.

        Only chunks after the match in ``tree`` are looked up in the store (FusionRAG 4.1, alternative path).
        """
        if tree is None:
            return replace(self, fetch=fetch)
        match = tree.read(self.segments, self.wanted, fingerprint, self.namespace)
        wanted = tuple(want for want in self.wanted if want.start >= match.tokens)
        return replace(self, wanted=wanted, prefix_match=match, fetch=fetch)

    def with_note(self, note: str) -> Self:
        """This request with another note for the report."""
        return replace(self, notes=(*self.notes, note))

    @property
    def token_ids(self) -> Ids:
        """The whole prompt."""
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def reusable(self) -> tuple[Wanted, ...]:
        """The cacheable segments that the policy may reuse."""
        if not self.reads_cache:
            return ()
        # A policy that keeps exact rows alone uses no other entries.
        exact_only = isinstance(self.policy, ExactPolicy)
        return tuple(want for want in self.wanted if want.exact or not exact_only)

    @property
    def reads_cache(self) -> bool:
        """False for an ordinary prefill."""
        return self.fallback is None and self.policy.reads_cache


class Estimator:
    """What a request that was not looked up yet would reuse, by the keys in memory.

    No tensor is read and no access counted. Entries in slow tiers count as not cached. Tokens that a policy
    recomputes count as cached.
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
            log.warning("a store failed to report what is in memory", exc_info=True)
            return False
