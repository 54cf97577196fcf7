"""One memory tier of the tree: which nodes have a copy in it, and which of them may leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.node import Node
from ragcachekit.store.base import StoreStats
from ragcachekit.store.counters import Counters
from ragcachekit.store.eviction.base import Access, EvictionPolicy
from ragcachekit.store.eviction.ranking import Ranking
from ragcachekit.store.memory.own_memory import in_own_memory

MOVED = Access(times=0)
"""Of a copy that comes from another tier: its uses were counted here when they happened."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A node's copy here. ``kept``: it never leaves; ``held``: the ranking passes over it."""

    node: Node
    kv: ChunkKV
    kept: bool = False
    held: bool = False


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
        self._copies: dict[bytes, _Copy] = {}
        self._children: dict[bytes, int] = {}  # copies here below a node, which itself may be elsewhere

    def __contains__(self, node: Node) -> bool:
        return node.digest in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[Node]:
        return iter([copy.node for copy in self._copies.values()])

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return self._ranking.nbytes

    def get(self, node: Node) -> ChunkKV | None:
        """The node's copy here."""
        copy = self._copies.get(node.digest)
        return None if copy is None else copy.kv

    def use(self, node: Node, access: Access) -> ChunkKV | None:
        """The node's copy here, if there is one; the use counts in any case (RAGCache 5.1: retrievals)."""
        self._ranking.note(node.digest, access)
        return self.get(node)

    def add(self, node: Node, kv: ChunkKV, access: Access = MOVED) -> bool:
        """Take a copy in, made of ``kv`` where that is elsewhere; there must be room (:meth:`spare`).

        ``access`` is the use that computed the node, where this is its first copy.
        False if the device has less memory left than the budget says.
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
        copy.held = self._has_to_stay(copy)
        if not access.times and not self._ranking.has_record(name):  # forgotten here, or lost with this tier
            access = replace(node.missed, times=node.uses)
        self._ranking.add(name, node.nbytes, node.tokens, access=access, hold=copy.held)
        if parent is not None:
            siblings = self._children.get(parent.digest, 0)
            self._children[parent.digest] = siblings + 1
            if not siblings:
                self.settle(parent)
        return True

    def keep(self, node: Node, keep: bool = True) -> None:
        """Never let this copy go, or let it go again."""
        self._copies[node.digest].kept = keep
        self.settle(node)

    def settle(self, node: Node) -> None:
        """Have the ranking pass over the node exactly while it is pinned, kept or has children here."""
        copy = self._copies.get(node.digest)
        if copy is None or copy.node is not node:  # gone from here, even if the same path is back by now
            return
        held = self._has_to_stay(copy)
        if held != copy.held:
            copy.held = held
            (self._ranking.hold if held else self._ranking.release)(node.digest)

    def spare(self, nbytes: int) -> bool:
        """Whether so many bytes more fit the budget."""
        return self._ranking.nbytes + nbytes <= self.budget

    def lowest(self) -> Node | None:
        """Who leaves next; None if nobody can."""
        name = self._ranking.lowest()
        return None if name is None else self._copies[name].node

    def evict(self) -> tuple[Node, ChunkKV] | None:
        """Let go of the lowest copy; None if nobody can leave. What it was used for is remembered a while."""
        name = self._ranking.evict()
        if name is None:
            return None
        self.counters.count("evictions")
        copy = self._let_go(name)
        return copy.node, copy.kv

    def remove(self, node: Node) -> None:
        """Let go of a copy, pinned or not, and of all that was known of it."""
        self._ranking.remove(node.digest)
        if node in self:
            self._let_go(node.digest)

    def stats(self) -> StoreStats:
        """The counters and the present content."""
        return self.counters.stats(entries=len(self), nbytes=self.nbytes, budget=self.budget)

    def check(self) -> None:
        """Assert what must always hold of this tier's own tables."""
        assert self.nbytes == sum(copy.kv.nbytes for copy in self._copies.values()) <= self.budget
        assert self._copies.keys() == set(self._ranking)
        for name, copy in self._copies.items():
            children = sum(child in self for child in copy.node.children.values())
            assert children == self._children.get(name, 0)
            assert copy.held == self._has_to_stay(copy)

    def _has_to_stay(self, copy: _Copy) -> bool:
        return bool(copy.node.pins) or copy.kept or copy.node.digest in self._children

    def _let_go(self, name: bytes) -> _Copy:
        copy = self._copies.pop(name)
        copy.node.copies -= 1
        parent = copy.node.parent
        if parent is not None:
            siblings = self._children.pop(parent.digest) - 1
            if siblings:
                self._children[parent.digest] = siblings
            else:
                self.settle(parent)
        return copy
