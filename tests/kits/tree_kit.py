"""Paths of made-up chunks, and KV that says which path it belongs to."""

import functools
import hashlib
from collections.abc import Sequence

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import Match, Node, Root, Step

ROOT = Root("weights-1", "acme")
ROW = 2 * 2 * 1 * 2 * 4
"""Bytes of one row of :func:`kv_of`: two layers of keys and values, one head, two numbers of four bytes."""


def step(name: str) -> Step:
    """The letter is the chunk, the number its tokens: ``a4``. ``s`` is a system text."""
    return Step((name,) if name[0] == "s" else (f"text-{name}", name), int(name[1:]), name[0] != "s")


def path_of(*names: str) -> tuple[Step, ...]:
    return tuple(map(step, names))


def kv_of(root: Root, path: Sequence[Step]) -> ChunkKV:
    """The KV of the last step: a function of the whole path."""
    return _kv_of(root, tuple(path))


@functools.cache
def _kv_of(root: Root, path: tuple[Step, ...]) -> ChunkKV:
    seed = int.from_bytes(hashlib.sha256(repr((root, path)).encode()).digest()[:4], "little")
    random = torch.Generator().manual_seed(seed)
    tokens, start = path[-1].tokens, sum(s.tokens for s in path[:-1])

    def tensors() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(1, tokens, 2, generator=random) for _ in range(2))

    return ChunkKV(tensors(), tensors(), start)


def same(one: ChunkKV, other: ChunkKV) -> bool:
    pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return one.start == other.start and all(torch.equal(a, b) for a, b in pairs)


def request(tree: KnowledgeTree, path: Sequence[Step], root: Root = ROOT) -> Match:
    """What one request does: look up, compute the rest, hand it in."""
    match = tree.match(root, path)
    tree.insert(match, [kv_of(root, path[: i + 1]) for i in range(len(match), len(path))], new=10)
    return match


def nodes(tree: KnowledgeTree) -> list[Node]:
    """All nodes in memory."""
    return [n for tops in tree.levels.roots.values() for top in tops.values() for n in top.subtree()]


def tiers(match: Match) -> list[str]:
    return [reused.tier.removeprefix("tree:") for reused in match.found]
