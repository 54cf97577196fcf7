"""The same requests through a store and a tree as the product opens them, over KV of two bytes per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.eviction.replay import TREE, Outcome, Plan, Prompt, Tally
from ragcachekit.config import StoreConfig, TreeConfig
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.prefix_tree.knowledge_tree import open_tree
from ragcachekit.prefix_tree.nodes import Root, Step
from ragcachekit.store.tiered import open_store
from ragcachekit.types import KVKey

TOKEN_BYTES = 2
_ROOT = Root("model", "default")

Serve = Callable[[Sequence[int]], list[int]]
"""Serves one request of documents; returns those of which the KV was there."""


def serve(plan: Plan, policy: str, capacity: int, profile: PrefillProfile, prompt: Prompt) -> Outcome:
    """Serve a plan's requests by :func:`open_tree` or :func:`open_store`, in host memory for so many tokens.

    Entries cost what :class:`ragcachekit.RagCache` passes: in the tree the prefill of the whole request, of a
    chunk that of its own tokens. Other than :func:`~benchmarks.eviction.replay.replay` this goes
    through all that holds, pins, counts and copies entries.
    """
    tokens, tally = plan.trace.tokens, Tally(plan)
    if plan.structure == TREE:
        request, close = _tree(tokens, policy, capacity * TOKEN_BYTES, profile, prompt)
    else:
        request, close = _store(tokens, policy, capacity * TOKEN_BYTES, profile)
    try:
        for documents in plan.trace.requests:
            hits = request(documents)
            hit_tokens = sum(tokens[doc] for doc in hits)
            new = prompt.question + sum(tokens[doc] for doc in documents) - hit_tokens
            tally.add(hits, len(documents), hit_tokens, profile.seconds(prompt.system + hit_tokens, new))
    finally:
        close()
    return tally.outcome()


def _tree(
    tokens: Sequence[int], policy: str, nbytes: int, profile: PrefillProfile, prompt: Prompt
) -> tuple[Serve, Callable[[], object]]:
    config = TreeConfig(host_bytes=nbytes + prompt.system * TOKEN_BYTES, eviction=policy)
    tree = open_tree(config, torch.device("cpu"), cost=profile.seconds)
    system = Step(("system",), prompt.system, document=False)

    def request(documents: Sequence[int]) -> list[int]:
        path = (system, *(Step((str(doc),), tokens[doc]) for doc in documents))
        match = tree.match(_ROOT, path)
        start, kvs = match.tokens, []
        for step in path[len(match) :]:
            kvs.append(_kv(step.tokens, start))
            start += step.tokens
        tree.insert(match, kvs, new=start - match.tokens + prompt.question)
        return list(documents[: max(0, len(match) - 1)])

    return request, tree.close


def _store(
    tokens: Sequence[int], policy: str, nbytes: int, profile: PrefillProfile
) -> tuple[Serve, Callable[[], object]]:
    config = StoreConfig(host_bytes=nbytes, eviction=policy)
    store = open_store(config, cost=lambda kv: profile.seconds(0, kv.tokens))
    keys = [KVKey("model", "default", str(doc)) for doc in range(len(tokens))]

    def request(documents: Sequence[int]) -> list[int]:
        found = {doc: store.get(keys[doc]) for doc in documents}
        for doc in (doc for doc, entry in found.items() if entry is None):
            store.put(keys[doc], _kv(tokens[doc], None))
        return [doc for doc in documents if found[doc] is not None]

    return request, store.close


def _kv(tokens: int, start: int | None) -> ChunkKV:
    keys, values = torch.empty(2, 1, tokens, 1, dtype=torch.uint8).unbind()
    return ChunkKV((keys,), (values,), start)
