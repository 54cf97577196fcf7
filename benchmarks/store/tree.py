"""What the knowledge tree costs per request beside moving tensors: ten documents among ten thousand nodes."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from benchmarks.store.bookkeeping import micros_row
from ragcachekit.errors import RagCacheError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import Root, Step
from ragcachekit.store.eviction import open_eviction

DOCUMENTS = 10
KNOWN, NEW = "tree, all known", "tree, all new, evicting as many"
_ROOT = Root("weights", "bench")
_SYSTEM = Step(("system",), 1, document=False)
_RECENT = 4 * (DOCUMENTS + 1)  # a full tree surely still has the prompts of a quarter of its nodes


def rows(*, nodes: int, requests: int, seed: int, policy: str = "pgdsf") -> list[dict[str, Any]]:
    """Time looking prompts of ten documents up, and inserting them, in a full tree.

    Counted: matching, pins, priorities, insertion and eviction. Not counted: copying KV (behind the
    answer) and moving it between tiers; entries are a few bytes.

    Returns
    -------
    list of dict
        Columns as of :func:`benchmarks.store.bookkeeping.rows`.
    """
    draw = random.Random(seed)
    tree = KnowledgeTree(host_bytes=nodes * 8, policy=lambda: open_eviction(policy))
    try:
        paths = _fill(tree, nodes, draw)
        timings: dict[str, list[float]] = {KNOWN: [], NEW: []}
        for number in range(2 * requests):
            name = NEW if number % 2 else KNOWN
            path = _path(draw) if name == NEW else draw.choice(paths[-max(1, nodes // _RECENT) :])
            kvs = _kvs()
            began = time.perf_counter()
            match = tree.match(_ROOT, path)
            found = len(match)
            tree.insert(match, kvs[found:], new=DOCUMENTS)
            timings[name].append((time.perf_counter() - began) * 1e6)
            if name == KNOWN and found != len(path):
                raise RagCacheError("the tree has lost a prompt that was inserted just now")
            paths.append(path)
        entries = _entries(tree)
        return [
            {"requests_of": name, "chunks": DOCUMENTS, "entries": entries, **micros_row(micros)}
            for name, micros in timings.items()
        ]
    finally:
        tree.close()


def _fill(tree: KnowledgeTree, nodes: int, draw: random.Random) -> list[tuple[Step, ...]]:
    paths: list[tuple[Step, ...]] = []
    while _entries(tree) < nodes and len(paths) < nodes:
        path = _path(draw)
        match = tree.match(_ROOT, path)
        tree.insert(match, _kvs()[len(match) :], new=DOCUMENTS)
        paths.append(path)
    return paths


def _entries(tree: KnowledgeTree) -> int:
    return sum(tier.entries for tier in tree.stats())


def _path(draw: random.Random) -> tuple[Step, ...]:
    ids = (f"{draw.randrange(1 << 60):064x}" for _ in range(DOCUMENTS))
    return (_SYSTEM, *(Step(("text", name), 1) for name in ids))


def _kvs() -> list[ChunkKV]:
    one = (torch.zeros(1, 1, 1),)
    return [ChunkKV(one, one, position) for position in range(DOCUMENTS + 1)]
