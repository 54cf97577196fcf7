"""One memory tier of the tree: copies of nodes, and which of them may be evicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.node import Node
from ragcachekit.store.base import StoreStats
from ragcachekit.store.counters import Counters
from ragcachekit.store.eviction.base import Access, EvictionPolicy
from ragcachekit.store.eviction.ranking import Ranking
from ragcachekit.store.memory.own_memory import in_own_memory

MOVED = Access(times=0)
"""Access of a copy from another tier: its uses were counted here when they happened."""


@dataclass(slots=True, eq=False)
class _Copy:
    node: Node
    kv: ChunkKV


class MemoryTier:
    """Copies on ``device`` within ``budget`` bytes; only those without children here are evicted.

    ``name`` is ``gpu`` or ``host``. Clocks are per tier (RAGCache section 5.1), so each has its own
    ``policy``. Not thread safe: the tree's lock protects it.
    """

    def __init__(self, name: str, budget: int, policy: EvictionPolicy, device: torch.device | str) -> None:
        self.name = f"tree:{name}"
        self.budget = budget
        self._device = torch.device(device)
        self.counters = Counters(self.name)
        self._ranking: Ranking[bytes] = Ranking(policy)
        self._copies: dict[bytes, _Copy] = {}
        self._children: Counter[bytes] = Counter()  # copies here below a node, which may be elsewhere

    def __contains__(self, node: Node) -> bool:
        return node.digest in self._copies

    def get(self, node: Node) -> ChunkKV | None:
        """The node's copy here."""
        copy = self._copies.get(node.digest)
        return None if copy is None else copy.kv

    def use(self, node: Node, access: Access) -> ChunkKV | None:
        """The node's copy here, if any; the use counts in any case (RAGCache 5.1: retrievals)."""
        self._ranking.note(node.digest, access)
        return self.get(node)

    def add(self, node: Node, kv: ChunkKV, access: Access = MOVED) -> bool:
        """Store a copy of ``kv``; there must be room (:meth:`spare`). False if the device is out of memory.

        ``access`` is the use that computed the node, if this is its first copy.
        """
        name, parent = node.digest, node.parent
        assert name not in self._copies
        try:
            copy = _Copy(node, in_own_memory(kv.to(self._device))[0])
        except torch.OutOfMemoryError:
            self.counters.count("failed_writes")
            self.counters.warn_once("memory", "no memory for %d bytes within the budget", node.nbytes)
            return False
        self._copies[name] = copy
        node.copies += 1
        self._ranking.add(name, node.nbytes, access=access)
        for _ in range(node.pins + self._children[name]):
            self._ranking.hold(name)
        if parent is not None:
            self._children[parent.digest] += 1
            self.hold(parent, 1)
        return True

    def hold(self, node: Node, by: int) -> None:
        """Exclude the node's copy here from eviction once more (1) or once less (-1), if there is one."""
        copy = self._copies.get(node.digest)
        if copy is not None and copy.node is node:  # not the same path inserted again
            (self._ranking.hold if by > 0 else self._ranking.release)(node.digest)

    def spare(self, nbytes: int) -> bool:
        """Whether so many more bytes fit."""
        return self._ranking.nbytes + nbytes <= self.budget

    def evict(self) -> tuple[Node, ChunkKV] | None:
        """Evict the copy of lowest priority, None if there is none; its uses are remembered for a while."""
        name = self._ranking.evict()
        if name is None:
            return None
        self.counters.count("evictions")
        copy = self._drop(name)
        return copy.node, copy.kv

    def remove(self, node: Node) -> None:
        """Remove a copy, pinned or not, and its uses."""
        self._ranking.remove(node.digest)
        if node in self:
            self._drop(node.digest)

    def stats(self) -> StoreStats:
        """The counters and the present content."""
        return self.counters.stats(entries=len(self._copies), nbytes=self._ranking.nbytes, budget=self.budget)

    def _drop(self, name: bytes) -> _Copy:
        copy = self._copies.pop(name)
        copy.node.copies -= 1
        parent = copy.node.parent
        if parent is not None:
            self._children[parent.digest] -= 1
            if not self._children[parent.digest]:
                del self._children[parent.digest]
            self.hold(parent, -1)
        return copy
