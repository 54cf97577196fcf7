"""The knowledge tree: exact KV of prompt beginnings, over GPU and host memory and a disk below."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path as FolderPath
from threading import RLock
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import KVStore, StoreStats, concerns
from ragcachekit.store.eviction.base import HIT, MISS, Access, EvictionPolicy
from ragcachekit.store.eviction.lru import Lru
from ragcachekit.tree.base import Cost, Match, Path, Reused, Root, Step, fault, key_of
from ragcachekit.tree.levels import Levels
from ragcachekit.tree.node import Node
from ragcachekit.tree.tier import MemoryTier
from ragcachekit.tree.turns import Turns
from ragcachekit.types import KVKey

if TYPE_CHECKING:
    from ragcachekit.tree.forgets import ForgetLog

DISK = "tree:disk"


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
        self._disk = disk
        self._forgets = _forgets_of(disk)
        self._cost = cost
        self._keep_first = keep_first
        self._epochs: Counter[str] = Counter()
        self._leaving: list[tuple[Root, Path, ChunkKV]] = []
        # Of matches that nobody holds any more; a finalizer may run anywhere, so it takes no lock.
        self._released: deque[tuple[Node, ...]] = deque()
        self._lock = RLock()
        self._writing = RLock()  # taken before the other one

    # -- the way of a request ----------------------------------------------------------------------

    def match(self, root: Root, path: Path) -> Match:
        """The longest beginning of ``path`` that is known, pinned while the result is held.

        Counts an access to each of its nodes.
        """
        path = tuple(path)
        with self._lock:
            self._unpin_released()
            self._hear(root.namespace)
            epoch = self._epochs[root.namespace]
            nodes = list(self._levels.walk(root, path, self._limit(path)))
            for node in nodes:
                self._levels.pin(node)
            found = [self._levels.use(node) for node in nodes]
            self._levels.count(len(path), found)
        found += self._on_disk(root, path, len(found))
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
        _check(match, kvs)
        seconds = self._cost(match.tokens, new) if self._cost is not None else float(new)
        missed = Access(False, seconds, new) if new else MISS
        with self._lock:
            self._unpin_released()
            if match.epoch != self._epochs[match.root.namespace]:
                return 0
            most = max(0, self._limit(match.path) - len(match))
            added = self._insert(match, list(kvs)[:most], missed)
        self._write_leaving()
        return added

    # -- upkeep ------------------------------------------------------------------------------------

    def prune(self, root: Root, path: Path) -> int:
        """Drop the node at ``path`` and all below it from memory; returns how many that were.

        For what a speculation computed and nobody asked for (RAGCache section 5.3).
        """
        with self._lock:
            nodes = list(self._levels.walk(root, path, len(path)))
            return self._levels.drop(nodes[-1]) if nodes and len(nodes) == len(path) else 0

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop all nodes that hold, or stand behind, one of ``chunk_ids`` (texts' ids too), from all tiers.

        ``None`` drops the whole namespace. What requests that run now have computed is not taken in.
        Turns of conversations too. Returns the number of nodes and turns dropped. Trees of other processes
        on the same disk folder follow at their next look-up, and write nothing of it until then.
        """
        with self._writing:
            if self._disk is None:
                keys, turns = self._drop(namespace, chunk_ids)
                return turns + len(keys)
            with self._forgets.forgetting(namespace, chunk_ids) if self._forgets else nullcontext():
                keys, turns = self._drop(namespace, chunk_ids)
                only_in_memory = sum(key not in self._disk for key in keys)
                return turns + only_in_memory + self._disk.forget(namespace, chunk_ids)

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
        if self._disk is not None:
            records += [replace(record, tier=f"tree:{record.tier}") for record in self._disk.stats()]
        return (*records, *self.turns.stats())

    def close(self) -> None:
        """Write what is in memory to the disk, where there is one, and let go of everything."""
        with self._lock:
            for node in list(self._levels):
                self._leave(node, self._levels.copy(node)[0])
            for tier in self._levels.tiers:
                self._levels.lose(tier)
        self.turns.clear()
        self._write_leaving()
        if self._disk is not None:
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

    def _limit(self, path: Path) -> int:
        """How many steps of a path the tree has to do with."""
        if self._keep_first is None:
            return len(path)
        documents = 0
        for number, step in enumerate(path):
            documents += step.document
            if documents > self._keep_first:
                return number
        return len(path)

    def _unpin_released(self) -> None:
        while self._released:
            for node in self._released.popleft():
                self._levels.pin(node, -1)

    def _drop(self, namespace: str, chunk_ids: frozenset[str] | None) -> tuple[list[KVKey], int]:
        """Forget in memory: keys of the nodes that went, and how many turns did."""
        turns = self.turns.forget(namespace, chunk_ids)
        with self._lock:
            self._epochs[namespace] += 1
            tops = self._levels.about(namespace, chunk_ids)
            keys = [key_of(node.root, node.path()) for top in tops for node in top.subtree()]
            for node in tops:
                self._levels.drop(node)
            self._leaving = [
                left for left in self._leaving if not concerns(key_of(*left[:2]), namespace, chunk_ids)
            ]
        return keys, turns

    def _hear(self, namespace: str) -> None:
        """Forget what other processes on the same disk have forgotten; the lock is held."""
        for ids in self._forgets.news(namespace) if self._forgets else ():
            self._drop(namespace, ids)

    def _insert(self, match: Match, kvs: Sequence[ChunkKV], missed: Access) -> int:
        nodes: list[Node] = []
        known, added = len(match), 0
        try:
            for number, kv in enumerate([*(reused.kv for reused in match.found), *kvs]):
                node, new = None, False
                if len(nodes) == number:  # else its parent is not in memory
                    parent = nodes[-1] if nodes else None
                    access = missed if number >= known else None
                    node, new = self._have(match.root, parent, match.path[number], kv, access)
                if node is not None:
                    nodes.append(node)
                elif number >= known and self._disk is not None:
                    self._leaving.append((match.root, match.path[: number + 1], kv))
                added += new and number >= known
            self._levels.promote(nodes)
        finally:
            for node in nodes:
                self._levels.pin(node, -1)
        return added

    def _have(
        self, root: Root, parent: Node | None, step: Step, kv: ChunkKV, missed: Access | None
    ) -> tuple[Node | None, bool]:
        """The node of a step, pinned, made if it is not there; None without room. And whether it is new.

        ``missed`` is the access of a step that the request computed, None where it was found.
        """
        node = self._levels.child(root, parent, step)
        if node is None:
            node = self._levels.admit(root, parent, step, kv, missed or HIT)
            return node, node is not None
        self._levels.pin(node)
        if missed is not None:  # another request computed the same meanwhile
            self._levels.use(node, missed)
        return node, False

    # -- the disk ----------------------------------------------------------------------------------

    def _on_disk(self, root: Root, path: Path, known: int) -> Iterator[Reused]:
        """The steps behind the first ``known``, as long as the disk has them."""
        if self._disk is None:
            return
        start = sum(step.tokens for step in path[:known])
        for number in range(known, self._limit(path)):
            step = path[number]
            key = key_of(root, path[: number + 1])
            found = self._disk.get(key) if key in self._disk else None
            if found is None or fault(found.kv, step, start):
                return
            yield Reused(step, found.kv, DISK)
            start += step.tokens

    def _leave(self, node: Node, kv: ChunkKV) -> None:
        if self._disk is not None:
            self._leaving.append((node.root, node.path(), kv))

    def _write_leaving(self) -> None:
        """Write what left memory. A ``forget`` waits for it, and it for a ``forget``, of any process."""
        if self._disk is None or not self._leaving:
            return
        with self._writing, self._forgets.writing() if self._forgets else nullcontext(True) as may_write:
            with self._lock:
                for namespace in {root.namespace for root, _, _ in self._leaving}:
                    self._hear(namespace)
                leaving, self._leaving = self._leaving, []
            for root, path, kv in leaving if may_write else ():
                key = key_of(root, path)
                if key not in self._disk:
                    self._disk.put(key, kv.to("cpu"))


@runtime_checkable
class _OnFolder(Protocol):
    """A store whose folder other processes may share."""

    folder: FolderPath


def _forgets_of(disk: KVStore | None) -> ForgetLog | None:
    if not isinstance(disk, _OnFolder):
        return None
    from ragcachekit.tree.forgets import ForgetLog  # POSIX only, as such a store is

    return ForgetLog(disk.folder / "forgets")


def _check(match: Match, kvs: Sequence[ChunkKV]) -> None:
    steps: Sequence[Step] = match.path[len(match) :]
    if len(kvs) > len(steps):
        raise ValueError(f"{len(kvs)} KVs for the {len(steps)} steps that the tree did not know")
    start = match.tokens
    for step, kv in zip(steps, kvs, strict=False):
        if reason := fault(kv, step, start):
            raise ValueError(f"not the exact KV of this step: {reason}")
        start += step.tokens
