"""Nodes of the knowledge tree, and their copies in GPU and host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import StoreStats
from ragcachekit.store.eviction import HIT, Access, Counters, EvictionPolicy, Ranking
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.store.memory import in_own_memory
from ragcachekit.types import KVKey, chunk_id, whole_id

ENCODING_PATH = "path"
"""Encoding of nodes in a store: after exactly the key's context, at exactly that position."""

BLOCK = 32
"""Tokens of a step of text. Prompts that part inside a block share the blocks before it."""

HOT_USES = 3
"""Look-ups after which a node of the GPU tier has a copy on the host as well (RAGCache section 6)."""

MOVED = Access(times=0)
"""Access of a copy from another tier: its uses were counted here when they happened."""

Cost = Callable[[int, int], float]
"""Estimated seconds of a prefill, from (cached, new) tokens (RAGCache section 5.1, T(alpha, beta))."""


@dataclass(frozen=True, slots=True)
class Root:
    """Scope in which exact KV may be shared: one model, one namespace, one set of RoPE frequencies."""

    fingerprint: str
    namespace: str
    regime: str = ""  # the frequencies, where they depend on the prompt's length


@dataclass(frozen=True, slots=True)
class Step:
    """One step down the tree: a block of text, or a chunk with the text before it that fills no block."""

    ids: tuple[str, ...]  # of the segments, in order; the chunk's is the last. They identify the tokens
    tokens: int  # rows of all of them
    document: bool = True  # False for text alone
    token_ids: tuple[int, ...] = field(default=(), compare=False, repr=False)  # for ``forget``; () if unknown


Path = Sequence[Step]
"""Steps from the start of a prompt down."""


@dataclass(frozen=True, slots=True, eq=False)
class Reused:
    """One node as a look-up found it: its exact KV (``kv.start`` is its position) and its tier."""

    step: Step
    kv: ChunkKV
    tier: str


@dataclass(frozen=True, eq=False)
class Match:
    """Longest known beginning of a path, its nodes pinned while this object lives."""

    root: Root
    path: tuple[Step, ...]  # as requested
    found: tuple[Reused, ...]  # its first steps, in order
    epoch: int = 0  # forgets before it; what a later one was about is not inserted

    def __len__(self) -> int:
        return len(self.found)

    @property
    def tokens(self) -> int:
        return sum(reused.step.tokens for reused in self.found)


def blocks_of(token_ids: Sequence[int], namespace: str) -> list[Step]:
    """The whole blocks of a text, as steps."""
    ends = range(BLOCK, len(token_ids) + 1, BLOCK)
    return [text_step(tuple(token_ids[end - BLOCK : end]), namespace) for end in ends]


def text_step(token_ids: tuple[int, ...], namespace: str) -> Step:
    """Text alone as one step."""
    return Step((chunk_id(token_ids, namespace),), len(token_ids), False, token_ids)


def key_of(root: Root, path: Path) -> KVKey:
    """Store key of the path's last node; ``forget`` of any id on the path drops it."""
    ids = tuple(i for step in path for i in step.ids)
    name = f"{ENCODING_PATH}@{root.regime}" if root.regime else ENCODING_PATH
    return KVKey(root.fingerprint, root.namespace, ids[-1], name, ids[:-1])


def fault(kv: ChunkKV, step: Step, start: int) -> str | None:
    """Why ``kv`` cannot be the exact KV of a step at ``start``; None if it may be."""
    if kv.quantised:
        return f"it was rounded to {kv.quantised}, and the tree holds exact KV only"
    if kv.start != start:
        return f"its keys are turned for position {kv.start}, the step stands at {start}"
    if kv.tokens != step.tokens:
        return f"it has {kv.tokens} tokens, the step {step.tokens}"
    return None


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One step at its position in the tree."""

    root: Root
    parent: Node | None  # None exactly at the start of a prompt
    step: Step
    nbytes: int  # of one copy of its KV
    children: dict[tuple[str, ...], Node] = field(default_factory=dict)  # by the ids of their steps
    copies: int = 0  # tiers that have its KV now
    pins: int = 0  # requests that use it now
    uses: int = 0  # look-ups since it came into memory
    digest: bytes = field(init=False)  # of its path, chained: equal after eviction and recomputation

    def __post_init__(self) -> None:
        root = self.root
        top = repr((root.fingerprint, root.namespace, root.regime)).encode()
        above = self.parent.digest if self.parent is not None else top
        self.digest = blake2b(above + b"\0" + repr(self.step.ids).encode(), digest_size=16).digest()

    def path(self) -> list[Step]:
        """Steps from the start of the prompt to this one."""
        node: Node | None = self
        steps = []
        while node is not None:
            steps.append(node.step)
            node = node.parent
        return steps[::-1]

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


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
        self._copies: dict[bytes, tuple[Node, ChunkKV]] = {}
        self._children: Counter[bytes] = Counter()  # copies here below a node, which may be elsewhere

    def __contains__(self, node: Node) -> bool:
        return node.digest in self._copies

    def get(self, node: Node) -> ChunkKV | None:
        return self._copies[node.digest][1] if node in self else None

    def use(self, node: Node, access: Access) -> ChunkKV | None:
        """The node's copy here, if any; the use counts in any case (RAGCache 5.1: retrievals)."""
        self._ranking.note(node.digest, access)
        return self.get(node)

    def add(self, node: Node, kv: ChunkKV, access: Access = MOVED) -> bool:
        """Store a copy of ``kv``; there must be room (:meth:`spare`). False if it cannot be copied.

        ``access`` is the use that computed the node, if this is its first copy.
        """
        name, parent = node.digest, node.parent
        assert name not in self._copies
        try:
            self._copies[name] = node, in_own_memory(kv.to(self._device))[0]
        except RuntimeError as error:  # out of memory, or the device failed
            self.counters.count("failed_writes")
            self.counters.warn_once("memory", "no copy of %d bytes: %s", node.nbytes, error)
            return False
        node.copies += 1
        self._ranking.add(name, node.nbytes, access=access)
        for _ in range(node.pins + self._children[name]):
            self._ranking.hold(name)
        if parent is not None:
            self._children[parent.digest] += 1
            self.hold(parent, 1)
        return True

    def replace(self, node: Node, kv: ChunkKV) -> None:
        """Store a larger copy in place of the node's; there must be room."""
        try:
            self._copies[node.digest] = node, in_own_memory(kv.to(self._device))[0]
        except RuntimeError:
            return
        node.nbytes = kv.nbytes
        self._ranking.add(node.digest, kv.nbytes, access=MOVED)

    def hold(self, node: Node, by: int) -> None:
        """Exclude the node's copy here from eviction once more (1) or once less (-1), if there is one."""
        if node in self and self._copies[node.digest][0] is node:  # not the same path inserted again
            (self._ranking.hold if by > 0 else self._ranking.release)(node.digest)

    def spare(self, nbytes: int) -> bool:
        return self._ranking.nbytes + nbytes <= self.budget

    def evict(self) -> tuple[Node, ChunkKV] | None:
        """Evict the copy of lowest priority, None if there is none; its uses are remembered for a while."""
        name = self._ranking.evict()
        if name is None:
            return None
        self.counters.count("evictions")
        return self._drop(name)

    def remove(self, node: Node) -> None:
        """Remove a copy, pinned or not, and its uses."""
        self._ranking.remove(node.digest)
        if node in self:
            self._drop(node.digest)

    def probe(self) -> None:
        """Read a number of every copy; RuntimeError if the device has lost it."""
        for _, kv in self._copies.values():
            kv.keys[-1].flatten()[:1].to("cpu", copy=True)

    def stats(self) -> StoreStats:
        return self.counters.stats(entries=len(self._copies), nbytes=self._ranking.nbytes, budget=self.budget)

    def _drop(self, name: bytes) -> tuple[Node, ChunkKV]:
        node, kv = self._copies.pop(name)
        node.copies -= 1
        if node.parent is not None:
            self._children[node.parent.digest] -= 1
            if not self._children[node.parent.digest]:
                del self._children[node.parent.digest]
            self.hold(node.parent, -1)
        return node, kv


class Levels:
    """Insertion, eviction and movement of nodes (RAGCache section 5.1, Algorithm 1).

    Every node is in some tier; a node in the GPU tier has its parent there, and a copy on the host after
    :data:`HOT_USES`, if its parent has. ``evicted`` is called with KV that is evicted from memory, or does
    not fit into it. Not thread safe: the tree's lock protects it.
    """

    def __init__(
        self,
        gpu: MemoryTier | None,
        host: MemoryTier | None,
        evicted: Callable[[Root, Path, ChunkKV], object],
    ) -> None:
        self.gpu, self.host = gpu, host
        self.tiers = [tier for tier in (gpu, host) if tier is not None]
        self._evicted, self.lost = evicted, list[StoreStats]()  # records of tiers that were given up
        self.roots: dict[Root, dict[tuple[str, ...], Node]] = {}

    def walk(self, root: Root, path: Path) -> Iterator[Node]:
        """Nodes along a path, as far as they exist."""
        children = self.roots.get(root, {})
        for step in path:
            node = children.get(step.ids)
            if node is None:
                return
            yield node
            children = node.children

    def about(self, namespace: str, chunk_ids: frozenset[str] | None) -> list[Node]:
        """Uppermost nodes of a namespace with one of these ids (None: all)."""
        roots = [children for root, children in self.roots.items() if root.namespace == namespace]
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
        for leaf in (n for top in self.about(namespace, None) for n in top.subtree() if not n.children):
            path = leaf.path()
            known = list(takewhile(lambda step: len(step.token_ids) == step.tokens, path))
            first = texts.first_part([step.token_ids for step in known]) if known else None
            if first is None and len(known) < len(path):
                first = len(known)
            if first is not None:
                out.add(path[first].ids[-1])
        return out

    def use(self, node: Node, access: Access = HIT) -> Reused:
        """Count an access and return the node's fastest copy, of several one with a state."""
        node.uses += 1
        copies = [(kv, tier.name) for tier in self.tiers if (kv := tier.use(node, access)) is not None]
        return Reused(node.step, *next((one for one in copies if one[0].has_state), copies[0]))

    def count(self, asked: int, found: Sequence[Reused]) -> None:
        """Count hits and misses of a look-up of ``asked`` steps, tier by tier."""
        names = [reused.tier for reused in found]
        for tier in self.tiers:
            here = names.count(tier.name)
            tier.counters.count("hits", here)
            tier.counters.count("misses", asked - here)
            asked -= here

    def pin(self, node: Node, by: int = 1) -> None:
        node.pins += by
        for tier in self.tiers:
            tier.hold(node, by)

    def insert(self, match: Match, kvs: Sequence[ChunkKV], missed: Access) -> int:
        """Insert all steps that were found or computed; returns how many of ``kvs`` are new in memory.

        Nodes move up to the GPU tier while there is room. ``missed`` is the access of computed steps.
        """
        nodes: list[Node] = []  # all pinned
        root, known, added = match.root, len(match), 0
        try:
            for number, kv in enumerate([*(reused.kv for reused in match.found), *kvs]):
                step, node, is_new = match.path[number], None, False
                if len(nodes) == number:  # else its parent is not in memory
                    parent = nodes[-1] if nodes else None
                    node = self._siblings(root, parent).get(step.ids)
                    if node is None:
                        node = self._admit(root, parent, step, kv, missed if number >= known else HIT)
                        is_new = node is not None
                    else:
                        self.pin(node)
                        if kv.has_state:
                            self._add_state(node, kv)
                        if number >= known:  # another request computed the same meanwhile
                            self.use(node, missed)
                if node is not None:
                    nodes.append(node)
                elif number >= known:
                    self._evicted(root, match.path[: number + 1], kv)
                added += is_new and number >= known
            for tier in self.tiers if self.gpu is not None else ():
                for node in nodes:
                    is_cold = tier is self.host and node.uses < HOT_USES
                    if node not in tier and (is_cold or not self._take(tier, node, self._copy(node))):
                        break
        finally:
            for node in nodes:
                self.pin(node, -1)
        return added

    def give_up_gpu(self) -> None:
        """Go on without the GPU tier: nodes without another copy go, and what is below them."""
        gpu, self.gpu = self.gpu, None
        if gpu is None:
            return
        self.tiers.remove(gpu)
        self.lost.append(replace(gpu.stats(), entries=0, nbytes=0, failures=1, writable=False))
        every = [n for tops in self.roots.values() for top in tops.values() for n in top.subtree()]
        for node in every:
            node.copies -= node in gpu
        for node in every:
            if not node.copies and (node.parent is None or node.parent.copies):
                self.drop(node, forgotten=False)

    def _admit(self, root: Root, parent: Node | None, step: Step, kv: ChunkKV, access: Access) -> Node | None:
        """Insert a node, pinned, into the fastest tier with room, or None; the parent must be pinned."""
        node = Node(root, parent, step, kv.nbytes, pins=1)
        for tier in self.tiers:
            beside = tier is self.host or parent is None or parent in tier
            if beside and self._take(tier, node, kv, access):
                for other in self.tiers:
                    if other is not tier:
                        other.use(node, access)
                siblings = self.roots.setdefault(root, {}) if parent is None else parent.children
                siblings[step.ids] = node
                return node
        return None

    def _add_state(self, node: Node, kv: ChunkKV) -> None:
        """Give a node that has rows alone a state, where there is room; the node must be pinned."""
        for tier in self.tiers:
            known = tier.get(node)
            if known is None or known.has_state or kv.nbytes > tier.budget:
                continue
            while not tier.spare(kv.nbytes - known.nbytes):
                if not self._evict(tier):
                    return
            tier.replace(node, kv)

    def drop(self, top: Node, *, forgotten: bool = True) -> None:
        """Remove a node and its subtree from the tree."""
        for node in reversed(list(top.subtree())):
            # A tier keeps the uses of an evicted node, unless the node is forgotten.
            here = [tier for tier in self.tiers if forgotten or node in tier]
            if here and not forgotten:
                self._evicted(node.root, node.path(), self._copy(node))
            for tier in here:
                tier.remove(node)
            node.children.clear()
        self._unlink(top)

    def clear(self) -> None:
        for top in [node for children in self.roots.values() for node in children.values()]:
            self.drop(top, forgotten=False)

    def _copy(self, node: Node) -> ChunkKV:
        """One of its copies, with a state if there is one; of the host, which needs no transfer."""
        copies = [kv for tier in reversed(self.tiers) if (kv := tier.get(node)) is not None]
        return next((kv for kv in copies if kv.has_state), copies[0])

    def _take(self, tier: MemoryTier, node: Node, kv: ChunkKV, access: Access = MOVED) -> bool:
        """Add a copy to a tier, once there is room; False if there is not."""
        if node.nbytes > tier.budget:
            tier.counters.count("failed_writes")
            return False
        while not tier.spare(node.nbytes):
            if not self._evict(tier):
                return False  # all of it is in use
        return tier.add(node, kv, access)

    def _evict(self, tier: MemoryTier) -> bool:
        """Evict one node (Algorithm 1): copied to the host the first time, later only dropped."""
        evicted = tier.evict()
        if evicted is None:
            return False
        victim, kv = evicted
        host = self.host if tier is self.gpu else None
        if host is not None and victim not in host:
            self._take(host, victim, kv)
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
            del self.roots[node.root]

    def _siblings(self, root: Root, parent: Node | None) -> dict[tuple[str, ...], Node]:
        return parent.children if parent is not None else self.roots.get(root, {})
