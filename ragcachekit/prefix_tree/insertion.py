"""Insertion of computed KV into the tree, step by step down a request's path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.base import Match, Path, Root, Step, fault
from ragcachekit.prefix_tree.levels import Levels
from ragcachekit.prefix_tree.node import Node
from ragcachekit.store.eviction.base import HIT, Access

Rejected = Callable[[Root, Path, ChunkKV], object]
"""Called with KV that does not fit into memory."""


def documents_first(path: Path, most: int | None) -> int:
    """Number of steps of a path up to its first ``most`` documents; None: all of them."""
    if most is None:
        return len(path)
    documents = 0
    for number, step in enumerate(path):
        documents += step.document
        if documents > most:
            return number
    return len(path)


def check_exact(match: Match, kvs: Sequence[ChunkKV]) -> None:
    """Raise ValueError unless ``kvs`` can be the exact KV of the first steps that ``match`` did not find."""
    steps: Sequence[Step] = match.path[len(match) :]
    if len(kvs) > len(steps):
        raise ValueError(f"{len(kvs)} KVs for the {len(steps)} steps that the tree did not have")
    start = match.tokens
    for step, kv in zip(steps, kvs, strict=False):
        if reason := fault(kv, step, start):
            raise ValueError(f"not the exact KV of this step: {reason}")
        start += step.tokens


def insert_nodes(
    levels: Levels, match: Match, kvs: Sequence[ChunkKV], missed: Access, rejected: Rejected
) -> int:
    """Insert all steps that were found or computed; returns how many of ``kvs`` are new in memory."""
    nodes: list[Node] = []
    known, added = len(match), 0
    try:
        for number, kv in enumerate([*(reused.kv for reused in match.found), *kvs]):
            node, new = None, False
            if len(nodes) == number:  # else its parent is not in memory
                parent = nodes[-1] if nodes else None
                access = missed if number >= known else None
                node, new = _insert(levels, match.root, parent, match.path[number], kv, access)
            if node is not None:
                nodes.append(node)
            elif number >= known:
                rejected(match.root, match.path[: number + 1], kv)
            added += new and number >= known
        levels.promote(nodes)
    finally:
        for node in nodes:
            levels.pin(node, -1)
    return added


def _insert(
    levels: Levels, root: Root, parent: Node | None, step: Step, kv: ChunkKV, missed: Access | None
) -> tuple[Node | None, bool]:
    """Pinned node of a step (None without room), and whether it is new; no ``missed`` if it was found."""
    node = levels.child(root, parent, step)
    if node is None:
        node = levels.admit(root, parent, step, kv, missed or HIT)
        return node, node is not None
    levels.pin(node)
    if missed is not None:  # another request computed the same meanwhile
        levels.use(node, missed)
    return node, False
