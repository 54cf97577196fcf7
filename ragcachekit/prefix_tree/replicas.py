"""Replicas: host copies of GPU nodes that are never evicted (RAGCache section 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ragcachekit.prefix_tree.memory_tier import MemoryTier
from ragcachekit.prefix_tree.node import Node

USES = 2
"""Uses from which on a node is replicated."""


class Replicas:
    """The most used upper nodes, within a byte budget; with a node always its parent.

    Not thread safe: the tree's lock protects it.
    """

    def __init__(self, budget: int, host: MemoryTier) -> None:
        self.budget = budget
        self._host = host
        self._nodes: dict[bytes, Node] = {}
        self._nbytes = 0

    def choose(self, path: Sequence[Node]) -> Iterator[Node]:
        """Yield the nodes of a path, from the top, to replicate now; the caller adds each or stops."""
        for node in path if self.budget else ():
            if node.digest in self._nodes:
                continue
            if node.uses < USES or not self._make_room(node):
                return
            yield node

    def add(self, node: Node) -> None:
        """Keep the node's host copy."""
        self._host.keep(node)
        self._nodes[node.digest] = node
        self._nbytes += node.nbytes

    def discard(self, node: Node) -> None:
        """Remove a node that left the tree."""
        if self._nodes.get(node.digest) is node:
            del self._nodes[node.digest]
            self._nbytes -= node.nbytes

    def check(self) -> None:
        """Assert the invariants."""
        assert self._nbytes == sum(node.nbytes for node in self._nodes.values()) <= self.budget
        for node in self._nodes.values():
            assert node in self._host
            assert node.parent is None or node.parent.digest in self._nodes

    def _make_room(self, node: Node) -> bool:
        """Release less used replicas, those without replicas below them first."""
        if node.nbytes > self.budget:
            return False
        while self._nbytes + node.nbytes > self.budget:
            parents = {n.parent.digest for n in self._nodes.values() if n.parent is not None}
            leaves = [n for n in self._nodes.values() if n.digest not in parents and n is not node.parent]
            least = min(leaves, key=lambda n: n.uses, default=None)
            if least is None or least.uses >= node.uses:
                return False
            self.discard(least)
            self._host.keep(least, False)
        return True
