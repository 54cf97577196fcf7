"""The tree in memory: its nodes, and their copies in GPU and host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.base import Match, Node, Path, Reused, Root, Step
from ragcachekit.store.base import Counters, StoreStats
from ragcachekit.store.eviction import HIT, Access, EvictionPolicy, Ranking
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.store.memory import in_own_memory
from ragcachekit.types import whole_id

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


Evicted = Callable[[Root, Path, ChunkKV], object]
"""Called with KV that is evicted from memory, or does not fit into it."""


class Levels:
    """Insertion, eviction and movement of nodes (RAGCache section 5.1, Algorithm 1).

    Every node is in some tier; a node in the GPU tier has its parent there. Not thread safe: the tree's lock
    protects it.
    """

    def __init__(self, gpu: MemoryTier | None, host: MemoryTier | None, evicted: Evicted) -> None:
        self.gpu, self.host = gpu, host
        self.tiers = [tier for tier in (gpu, host) if tier is not None]
        self._evicted = evicted
        self._roots: dict[Root, dict[tuple[str, ...], Node]] = {}

    def walk(self, root: Root, path: Path, most: int) -> Iterator[Node]:
        """Nodes along a path, as far as they exist and at most ``most``."""
        children = self._roots.get(root, {})
        for step in islice(path, most):
            node = children.get(step.ids)
            if node is None:
                return
            yield node
            children = node.children

    def copy(self, node: Node) -> tuple[ChunkKV, MemoryTier]:
        """KV of the node and its fastest tier."""
        return next((kv, tier) for tier in self.tiers if (kv := tier.get(node)) is not None)

    def about(self, namespace: str, chunk_ids: frozenset[str] | None) -> list[Node]:
        """Uppermost nodes of a namespace with one of these ids (None: all)."""
        roots = [children for root, children in self._roots.items() if root.namespace == namespace]
        stack, out = [node for children in roots for node in children.values()], []
        while stack:
            node = stack.pop()
            if chunk_ids is None or not chunk_ids.isdisjoint(map(whole_id, node.step.ids)):
                out.append(node)
            else:
                stack.extend(node.children.values())
        return out

    def holding(self, namespace: str, texts: ForgottenTexts) -> set[str]:
        """On every path of a namespace, the id of the step that one of the texts begins in.

        Where a step's tokens are not known, its own id: nobody can tell.
        """
        out: set[str] = set()
        for node in self.about(namespace, None):
            for leaf in [below for below in node.subtree() if not below.children]:
                path = leaf.path()
                known = list(takewhile(lambda step: len(step.token_ids) == step.tokens, path))
                first = texts.first_part([step.token_ids for step in known]) if known else None
                if first is None and len(known) < len(path):
                    first = len(known)
                if first is not None:
                    out.add(path[first].ids[-1])
        return out

    def use(self, node: Node, access: Access = HIT) -> Reused:
        """Count an access and return the node's fastest copy."""
        copies = [(kv, tier.name) for tier in self.tiers if (kv := tier.use(node, access)) is not None]
        return Reused(node.step, *copies[0])

    def count(self, asked: int, found: Sequence[Reused]) -> None:
        """Count hits and misses of a look-up of ``asked`` steps, tier by tier."""
        names = [reused.tier for reused in found]
        for tier in self.tiers:
            here = names.count(tier.name)
            tier.counters.count("hits", here)
            tier.counters.count("misses", asked - here)
            asked -= here

    def pin(self, node: Node, by: int = 1) -> None:
        """Change the number of requests that hold the node."""
        node.pins += by
        for tier in self.tiers:
            tier.hold(node, by)

    def _admit(self, root: Root, parent: Node | None, step: Step, kv: ChunkKV, access: Access) -> Node | None:
        """Insert a node, pinned, into the fastest tier with room, or None; the parent must be pinned."""
        node = Node(root, parent, step, kv.nbytes, pins=1)
        for tier in self.tiers:
            beside = tier is self.host or parent is None or parent in tier
            if beside and self._take(tier, node, kv, access):
                for other in self.tiers:
                    if other is not tier:
                        other.use(node, access)
                siblings = self._roots.setdefault(root, {}) if parent is None else parent.children
                siblings[step.ids] = node
                return node
        return None

    def insert(self, match: Match, kvs: Sequence[ChunkKV], missed: Access) -> int:
        """Insert all steps that were found or computed; returns how many of ``kvs`` are new in memory."""
        nodes: list[Node] = []
        known, added = len(match), 0
        try:
            for number, kv in enumerate([*(reused.kv for reused in match.found), *kvs]):
                node, new = None, False
                if len(nodes) == number:  # else its parent is not in memory
                    parent = nodes[-1] if nodes else None
                    access = missed if number >= known else None
                    node, new = self._insert(match.root, parent, match.path[number], kv, access)
                if node is not None:
                    nodes.append(node)
                elif number >= known:
                    self._evicted(match.root, match.path[: number + 1], kv)
                added += new and number >= known
            self._promote(nodes)
        finally:
            for node in nodes:
                self.pin(node, -1)
        return added

    def _insert(
        self, root: Root, parent: Node | None, step: Step, kv: ChunkKV, missed: Access | None
    ) -> tuple[Node | None, bool]:
        """Pinned node of a step (None without room), and whether it is new; no ``missed`` if it was found."""
        node = self._siblings(root, parent).get(step.ids)
        if node is None:
            node = self._admit(root, parent, step, kv, missed or HIT)
            return node, node is not None
        self.pin(node)
        if missed is not None:  # another request computed the same meanwhile
            self.use(node, missed)
        return node, False

    def _promote(self, path: Sequence[Node]) -> None:
        """Copy pinned nodes to GPU memory while there is room, from the top."""
        if self.gpu is None:
            return
        for node in path:
            if node not in self.gpu and not self._take(self.gpu, node, self.copy(node)[0]):
                break

    def drop(self, top: Node, *, forgotten: bool = True) -> None:
        """Remove a node and its subtree from the tree."""
        for node in reversed(list(top.subtree())):
            # A tier keeps the uses of an evicted node, unless the node is forgotten.
            here = [tier for tier in self.tiers if forgotten or node in tier]
            if here and not forgotten:
                self._evicted(node.root, node.path(), self.copy(node)[0])
            for tier in here:
                tier.remove(node)
            node.children.clear()
        self._unlink(top)

    def clear(self) -> None:
        """Evict all nodes."""
        for top in [node for children in self._roots.values() for node in children.values()]:
            self.drop(top, forgotten=False)

    def _take(self, tier: MemoryTier, node: Node, kv: ChunkKV, access: Access = MOVED) -> bool:
        return self._make_room(tier, node.nbytes) and tier.add(node, kv, access)

    def _make_room(self, tier: MemoryTier, nbytes: int) -> bool:
        if nbytes > tier.budget:
            tier.counters.count("failed_writes")
            return False
        while not tier.spare(nbytes):
            if not self._evict(tier):
                return False  # all of it is in use
        return True

    def _evict(self, tier: MemoryTier) -> bool:
        """Evict one node (Algorithm 1): copied to the host the first time, later only dropped."""
        evicted = tier.evict()
        if evicted is None:
            return False
        victim, kv = evicted
        host = self.host if tier is self.gpu else None
        if host is not None and victim not in host and self._make_room(host, victim.nbytes):
            host.add(victim, kv)
        if not victim.copies:
            self._evicted(victim.root, victim.path(), kv)
            for child in list(victim.children.values()):
                self.drop(child, forgotten=False)
            self._unlink(victim)
        return True

    def _unlink(self, node: Node) -> None:
        siblings = self._siblings(node.root, node.parent)
        del siblings[node.step.ids]
        if node.parent is None and not siblings:
            del self._roots[node.root]

    def _siblings(self, root: Root, parent: Node | None) -> dict[tuple[str, ...], Node]:
        return parent.children if parent is not None else self._roots.get(root, {})
