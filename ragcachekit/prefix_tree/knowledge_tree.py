"""The knowledge tree: exact KV of prompt beginnings, over GPU and host memory and a disk below."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from threading import RLock

import torch

from ragcachekit.forks import refuse_after_fork
from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.base import Cost, Match, Path, Root, key_of
from ragcachekit.prefix_tree.conversations import Turns
from ragcachekit.prefix_tree.disk import TreeDisk
from ragcachekit.prefix_tree.insertion import check_exact, documents_first, take_in
from ragcachekit.prefix_tree.levels import Levels
from ragcachekit.prefix_tree.memory_tier import MemoryTier
from ragcachekit.prefix_tree.node import Node
from ragcachekit.store.base import KVStore, StoreStats
from ragcachekit.store.eviction.base import MISS, Access, EvictionPolicy
from ragcachekit.store.eviction.lru import Lru
from ragcachekit.types import KVKey


class KnowledgeTree:
    """Exact KV of ordered chunks, found by the path from the start of the prompt (RAGCache section 5.1).

    A node's KV is that of its rows as a prefill of exactly its path computed them, turned for exactly
    its position. Within each memory tier nodes without children leave first, and what is in a tier has
    its parent in the same or a faster one. A node that leaves GPU memory is copied to the host the first
    time and only let go of later ("swap out only once"); one that leaves memory altogether is written to
    the disk, unless it is there.

    Thread safe. Writing to the disk happens in :meth:`insert` and :meth:`close`, outside the lock that
    look-ups take.

    Parameters
    ----------
    gpu_bytes, host_bytes : int
        Budgets; 0 leaves a tier out.
    device : torch.device or str
        Where ``gpu_bytes`` are.
    disk : KVStore, optional
        Keeps what left memory; the tree closes it. What another tree on the same folder forgets, also in
        another process, this one forgets too.
    policy : callable
        Makes one eviction policy per tier.
    cost : callable, optional
        Estimated seconds of a prefill of (cached, new) tokens, for policies that weigh costs; default
        proportional to the new ones.
    keep_first : int, optional
        Keep only so many documents of each prompt: the ones behind them are rarely asked for in the same
        order again.
    replicate_bytes : int
        Part of ``host_bytes`` that keeps copies of the most used upper nodes of the GPU tier, so that
        losing the GPU does not lose every root (RAGCache section 6).
    turns_bytes : int
        Budget of the last turns of conversations, beside the tree.

    Attributes
    ----------
    turns : Turns
        Prompts with their answers, exact or not; nothing of it is ever found by :meth:`match`.

    Raises
    ------
    ValueError
        For negative numbers, or replicas without the tiers they need.
    """

    def __init__(
        self,
        *,
        gpu_bytes: int = 0,
        host_bytes: int = 0,
        device: torch.device | str = "cuda",
        disk: KVStore | None = None,
        policy: Callable[[], EvictionPolicy] = Lru,
        cost: Cost | None = None,
        keep_first: int | None = None,
        replicate_bytes: int = 0,
        turns_bytes: int = 0,
    ) -> None:
        if min(gpu_bytes, host_bytes, replicate_bytes, keep_first or 0) < 0:
            raise ValueError("gpu_bytes, host_bytes, replicate_bytes and keep_first must not be negative")
        if replicate_bytes > host_bytes or (replicate_bytes and not gpu_bytes):
            raise ValueError(
                "replicate_bytes is the part of host_bytes that keeps copies of GPU nodes: "
                "give gpu_bytes, and no more than host_bytes"
            )
        gpu = MemoryTier("gpu", gpu_bytes, policy(), device) if gpu_bytes else None
        host = MemoryTier("host", host_bytes, policy(), "cpu") if host_bytes else None
        self._levels = Levels(gpu, host, replicate_bytes, self._leave)
        self.turns = Turns(turns_bytes)
        self._cost = cost
        self._keep_first = keep_first
        self._epochs: Counter[str] = Counter()
        # Of matches that nobody holds any more; a finalizer may run anywhere, so it takes no lock.
        self._released: deque[tuple[Node, ...]] = deque()
        self._lock = RLock()
        self._disk = TreeDisk(disk, self._lock, self._drop)
        refuse_after_fork(self)

    # -- the way of a request ----------------------------------------------------------------------

    def match(self, root: Root, path: Path) -> Match:
        """The longest beginning of ``path`` that is known, pinned while the result is held.

        Counts an access to each of its nodes.
        """
        path = tuple(path)
        most = documents_first(path, self._keep_first)
        with self._lock:
            self._unpin_released()
            self._disk.hear(root.namespace)
            epoch = self._epochs[root.namespace]
            nodes = list(self._levels.walk(root, path, most))
            for node in nodes:
                self._levels.pin(node)
            found = [self._levels.use(node) for node in nodes]
            self._levels.count(len(path), found)
        found += self._disk.read(root, path[:most], len(found))
        match = Match(root, path, tuple(found), epoch)
        if nodes:
            weakref.finalize(match, self._released.append, tuple(nodes)).atexit = False
        return match

    def insert(self, match: Match, kvs: Sequence[ChunkKV] = (), *, new: int = 0) -> int:
        """Take in what a request has computed behind its ``match``: call it once per request, afterwards.

        Also takes what was matched on the disk into memory, and what was matched into the GPU tier, and
        writes what has to leave memory to the disk; so it belongs behind the answer.

        Parameters
        ----------
        match : Match
            Of the request.
        kvs : sequence of ChunkKV
            Of the first steps that ``match`` did not find, in order; kept by reference.
        new : int
            Tokens that the request computed, for the estimate of its cost.

        Returns
        -------
        int
            How many of ``kvs`` are in memory now and were not before.

        Raises
        ------
        ValueError
            For KV that is not exact, or not that step's: quantised, at another position, another length.
            Nothing is taken in then.
        """
        check_exact(match, kvs)
        seconds = self._cost(match.tokens, new) if self._cost is not None else float(new)
        missed = Access(False, seconds, new) if new else MISS
        with self._lock:
            self._unpin_released()
            if match.epoch != self._epochs[match.root.namespace]:
                return 0
            most = max(0, documents_first(match.path, self._keep_first) - len(match))
            added = take_in(self._levels, match, list(kvs)[:most], missed, self._disk.leave)
        self._disk.write()
        return added

    # -- upkeep ------------------------------------------------------------------------------------

    def prune(self, root: Root, path: Path) -> int:
        """Drop the node at ``path`` and all below it from memory; returns how many that were.

        For what a speculation computed and nobody asked for (RAGCache section 5.3).
        """
        with self._lock:
            nodes = list(self._levels.walk(root, path, len(path)))
            return self._levels.drop(nodes[-1]) if nodes and len(nodes) == len(path) else 0

    def discard(self, root: Root, path: Path) -> None:
        """Drop the node at ``path``, whose KV cannot be used, from all tiers, and from memory all below."""
        with self._lock:
            self.prune(root, path)
            self._disk.discard(root, path)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop all nodes that hold, or stand behind, one of ``chunk_ids`` (texts' ids too), from all tiers.

        ``None`` drops the whole namespace. What requests that run now have computed is not taken in.
        Turns of conversations too. Returns the number of nodes and turns dropped. Trees of other processes
        on the same disk folder follow at their next look-up, and write nothing of it until then.
        """
        return self._disk.forget(namespace, chunk_ids)

    def lose(self, tier: str) -> int:
        """Let go of all copies in ``gpu`` or ``host``, as after a fault; returns how many nodes left memory.

        What has another copy, and its parents too, is still found (RAGCache section 6).
        """
        with self._lock:
            known = {"gpu": self._levels.gpu, "host": self._levels.host}
            if tier not in known:
                raise ValueError(f"the tree's memory tiers are gpu and host, not {tier!r}")
            lost = known[tier]
            return self._levels.lose(lost) if lost is not None else 0

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per tier, named ``tree:gpu``, ``tree:host``, ``tree:disk``, ``tree:turns``."""
        with self._lock:
            records = [tier.stats() for tier in self._levels.tiers]
        return (*records, *self._disk.stats(), *self.turns.stats())

    def close(self) -> None:
        """Write what is in memory to the disk, where there is one, and let go of everything."""
        with self._lock:
            for node in list(self._levels):
                self._leave(node, self._levels.copy(node)[0])
            for tier in self._levels.tiers:
                self._levels.lose(tier)
        self.turns.clear()
        self._disk.close()

    def __len__(self) -> int:
        """Nodes in memory."""
        with self._lock:
            return sum(1 for _ in self._levels)

    def check(self) -> None:
        """Assert what must hold after any operation; for tests."""
        with self._lock:
            self._unpin_released()
            self._levels.check()

    # -- steps -------------------------------------------------------------------------------------

    def _unpin_released(self) -> None:
        while self._released:
            for node in self._released.popleft():
                self._levels.pin(node, -1)

    def _drop(self, namespace: str, chunk_ids: frozenset[str] | None) -> tuple[list[KVKey], int]:
        """Forget in memory: keys of the nodes that went, and how many turns did."""
        with self._lock:  # turns too, or a request could find them gone and the nodes not
            turns = self.turns.forget(namespace, chunk_ids)
            self._epochs[namespace] += 1
            tops = self._levels.about(namespace, chunk_ids)
            keys = [key_of(node.root, node.path()) for top in tops for node in top.subtree()]
            for node in tops:
                self._levels.drop(node)
            self._disk.let_go(namespace, chunk_ids)
        return keys, turns

    def _leave(self, node: Node, kv: ChunkKV) -> None:
        if self._disk.store is not None:
            self._disk.leave(node.root, node.path(), kv)
