"""One memory tier of the tree: which nodes have a copy in it, and which of them may leave."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import StoreStats
from ragcachekit.store.counters import Counters
from ragcachekit.store.eviction.base import Access, EvictionPolicy
from ragcachekit.store.eviction.ranking import Ranking
from ragcachekit.tree.node import Node

MOST_REPLAYED = 16
"""Uses that a node brings along when it moves to a slower tier, at most."""


class MemoryTier:
    """Copies within a byte budget; those without children here leave first, the lowest priority first.

    Not thread safe: it belongs to a tree and its lock.

    Parameters
    ----------
    name : str
        ``gpu`` or ``host``.
    budget : int
        Bytes.
    policy : EvictionPolicy
        Its own: clocks are kept per tier (RAGCache section 5.1).
    device : torch.device or str
        Whose memory it is.
    """

    def __init__(self, name: str, budget: int, policy: EvictionPolicy, device: torch.device | str) -> None:
        self.name = f"tree:{name}"
        self.budget = budget
        self._device = torch.device(device)
        self.counters = Counters(self.name)
        self._ranking: Ranking[bytes] = Ranking(policy)
        self._nodes: dict[bytes, Node] = {}
        self._kv: dict[bytes, ChunkKV] = {}
        self._children: dict[bytes, int] = {}
        self._held: set[bytes] = set()
        self._kept: set[bytes] = set()

    def __contains__(self, node: Node) -> bool:
        return node.digest in self._kv

    def __len__(self) -> int:
        return len(self._kv)

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return self._ranking.nbytes

    def get(self, node: Node) -> ChunkKV | None:
        """The node's copy here."""
        return self._kv.get(node.digest)

    def add(self, node: Node, kv: ChunkKV) -> bool:
        """Take a copy in, made of ``kv`` where that is elsewhere; there must be room (:meth:`spare`).

        False if the device has less memory left than the budget says.
        """
        assert node not in self
        name = node.digest
        try:
            self._kv[name] = kv.to(self._device)
        except torch.OutOfMemoryError:
            self.counters.count("failed_writes")
            self.counters.warn_once("memory", "no memory for %d bytes within the budget", node.nbytes)
            return False
        self._nodes[name] = node
        self._ranking.add(name, node.nbytes, node.tokens, access=node.missed)
        for _ in range(min(node.uses, MOST_REPLAYED) - 1):
            self._ranking.touch(name)
        if node.parent is not None:
            self._children[node.parent.digest] = self._children.get(node.parent.digest, 0) + 1
            self.settle(node.parent)
        self.settle(node)
        return True

    def touch(self, node: Node, access: Access) -> None:
        """Count a use, where the node is here."""
        self._ranking.touch(node.digest, access)

    def keep(self, node: Node, keep: bool = True) -> None:
        """Never let this copy go, or let it go again."""
        (self._kept.add if keep else self._kept.discard)(node.digest)
        self.settle(node)

    def settle(self, node: Node) -> None:
        """Have the ranking pass over the node exactly while it is pinned, kept or has children here."""
        name = node.digest
        if self._nodes.get(name) is not node:  # gone from here, even if the same path is back by now
            return
        held = bool(node.pins or name in self._kept or self._children.get(name))
        if held != (name in self._held):
            (self._ranking.hold if held else self._ranking.release)(name)
            (self._held.add if held else self._held.discard)(name)

    def spare(self, nbytes: int) -> bool:
        """Whether so many bytes more fit the budget."""
        return self.nbytes + nbytes <= self.budget

    def lowest(self) -> Node | None:
        """Who leaves next; None if nobody can."""
        name = self._ranking.lowest()
        return None if name is None else self._nodes[name]

    def evict(self) -> None:
        """Let go of :meth:`lowest`; what it was used for is remembered for a while."""
        name = self._ranking.evict()
        assert name is not None
        self.counters.count("evictions")
        self._let_go(self._nodes[name])

    def remove(self, node: Node) -> None:
        """Let go of a copy, pinned or not, and of all that was known of it."""
        self._ranking.remove(node.digest)
        if node in self:
            self._let_go(node)

    def stats(self) -> StoreStats:
        """The counters and the present content."""
        return self.counters.stats(entries=len(self), nbytes=self.nbytes, budget=self.budget)

    def check(self) -> None:
        """Assert what must always hold of this tier's own tables."""
        assert self.nbytes == sum(kv.nbytes for kv in self._kv.values()) <= self.budget
        assert self._kv.keys() == self._nodes.keys() == set(self._ranking)
        for name, node in self._nodes.items():
            children = sum(child in self for child in node.children.values())
            assert children == self._children.get(name, 0)
            assert (name in self._held) == bool(node.pins or name in self._kept or children)

    def _let_go(self, node: Node) -> None:
        name = node.digest
        del self._kv[name], self._nodes[name]
        self._held.discard(name)
        self._kept.discard(name)
        if node.parent is not None:
            self._children[node.parent.digest] -= 1
            if not self._children[node.parent.digest]:
                del self._children[node.parent.digest]
            self.settle(node.parent)
