"""The knowledge tree: exact KV of prompt beginnings, in GPU and host memory and on a disk; past turns."""

from __future__ import annotations

import logging
import pathlib
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock, RLock
from typing import NamedTuple

import torch

from ragcachekit.config import TreeConfig
from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.disk import FOLDER, Dropped, TreeDisk
from ragcachekit.prefix_tree.nodes import (
    BLOCK,
    Cost,
    Levels,
    Match,
    MemoryTier,
    Node,
    Path,
    Root,
    blocks_of,
    fault,
    key_of,
)
from ragcachekit.prompt.tokenizer import common_length
from ragcachekit.store.base import KVStore, StoreStats
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.eviction import MISS, Access, Counters, EvictionPolicy, Lru, open_eviction
from ragcachekit.store.forgets import ForgetEpochs, ForgottenTexts
from ragcachekit.types import Ids, whole_id

log = logging.getLogger(__name__)

MIN_TOKENS = 16
"""Shortest common beginning that counts as a continued conversation."""

MAX_LOOKS = 10_000
"""Nodes that :meth:`KnowledgeTree.longest_chain` looks at, at most."""


@dataclass(frozen=True, eq=False)
class Turn:
    """KV of one turn. Rows from ``exact`` on are approximate, and stay so when reused."""

    root: Root
    token_ids: tuple[int, ...]  # prompt and answer, as far as there is KV of them
    kv: ChunkKV  # of these tokens, rotated from position 0 on
    exact: int  # rows from the start that equal those of an ordinary prefill
    members: frozenset[str]  # ids of the prompt's segments; ``forget`` of any of them drops the turn

    def rows(self, start: int, stop: int) -> ChunkKV:
        """View of some of its rows."""
        return ChunkKV(
            tuple(k[:, start:stop] for k in self.kv.keys),
            tuple(v[:, start:stop] for v in self.kv.values),
            start,
        )


class Turns:
    """Turns within a byte budget, evicted least recently used first. Thread safe.

    Separate from the tree, as a turn may hold approximate rows. ``budget`` is in bytes; 0 keeps none. A
    look-up compares the prompt with every turn: no index, as KV of a turn takes megabytes.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"turns_bytes must be >= 0, got {budget}")
        self.budget = budget
        self.epoch = 0  # number of ``forget`` calls; a turn begun before one is not kept after it
        self.kept: OrderedDict[int, Turn] = OrderedDict()
        self._nbytes = 0
        self._number = 0
        self._lock = Lock()
        self._counters = Counters("tree:turns")

    def longest(self, root: Root, token_ids: Sequence[int]) -> tuple[Turn, int] | None:
        """The latest turn with the longest common beginning, and its tokens; None below ``MIN_TOKENS``."""
        if not self.budget:
            return None
        asked = tuple(token_ids)
        with self._lock:
            turns = ((n, turn.token_ids) for n, turn in self.kept.items() if turn.root == root)
            tokens, best = max(((common_length(known, asked), n) for n, known in turns), default=(0, 0))
            self._counters.count("hits" if tokens >= MIN_TOKENS else "misses")
            if tokens < MIN_TOKENS:
                return None
            self.kept.move_to_end(best)
            return self.kept[best], tokens

    def keep(self, turn: Turn, epoch: int) -> bool:
        """Keep a turn in place of those that begin it; False if it is too large or of an older epoch."""
        with self._lock:
            if epoch != self.epoch:
                return False
            if turn.kv.nbytes > self.budget:
                self._counters.count("failed_writes")
                return False
            for number, other in list(self.kept.items()):
                ids = other.token_ids
                if other.root == turn.root and turn.token_ids[: len(ids)] == ids:
                    self._remove(number)
            while self._nbytes + turn.kv.nbytes > self.budget:
                self._remove(next(iter(self.kept)))
                self._counters.count("evictions")
            self._number += 1
            self.kept[self._number] = turn
            self._nbytes += turn.kv.nbytes
            return True

    def forget(
        self, namespace: str, chunk_ids: frozenset[str] | None = None, texts: ForgottenTexts | None = None
    ) -> int:
        """Drop turns whose prompt had one of these segments or texts; no ids drop the namespace's."""
        with self._lock:
            self.epoch += 1
            before = len(self.kept)
            for number, turn in list(self.kept.items()):
                named = chunk_ids is None or not chunk_ids.isdisjoint(turn.members)
                if turn.root.namespace == namespace and (
                    named or (texts is not None and texts.begin_in(turn.token_ids))
                ):
                    self._remove(number)
            return before - len(self.kept)

    def stats(self) -> tuple[StoreStats, ...]:
        """One record; none where no turns are kept."""
        if not self.budget:
            return ()
        with self._lock:
            entries, nbytes = len(self.kept), self._nbytes
        return (self._counters.stats(entries=entries, nbytes=nbytes, budget=self.budget),)

    def clear(self) -> None:
        with self._lock:
            self.kept.clear()
            self._nbytes = 0

    def _remove(self, number: int) -> None:
        self._nbytes -= self.kept.pop(number).kv.nbytes


class KnowledgeTree:
    """Exact KV of ordered chunks, found by the path from the start of the prompt (RAGCache section 5.1).

    Nodes without children are evicted first, from the GPU to the host the first time ("swap out only once"),
    from memory to the disk. Thread safe. The disk is written in :meth:`insert` and :meth:`close`, outside the
    lock that look-ups take.

    Budgets are in bytes; 0 leaves a tier out. ``disk`` is closed with the tree; forgets of other trees on the
    same folder, also in other processes, apply to this one too. ``policy`` makes one eviction policy per
    tier. ``cost`` is the time of a prefill of (cached, new) tokens in seconds; default: the number of new
    ones. :meth:`match` never finds :attr:`turns`.
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
        turns_bytes: int = 0,
    ) -> None:
        if min(gpu_bytes, host_bytes) < 0:
            raise ValueError("gpu_bytes and host_bytes must not be negative")
        gpu = MemoryTier("gpu", gpu_bytes, policy(), device) if gpu_bytes else None
        host = MemoryTier("host", host_bytes, policy(), "cpu") if host_bytes else None
        self.turns = Turns(turns_bytes)
        self._cost = cost
        self._forgets = ForgetEpochs()
        # Nodes of collected matches; a finalizer may run anywhere, so it takes no lock.
        self._released: deque[tuple[Node, ...]] = deque()
        self._lock = RLock()
        self.disk = TreeDisk(disk, self._lock, self._drop)
        self.levels = Levels(gpu, host, self.disk.add)

    def match(self, root: Root, path: Path) -> Match:
        """The longest known beginning of ``path``, pinned while the result is held; counts as an access."""
        path = tuple(path)
        with self._lock:
            self._unpin_released()
            self.disk.apply_forgets(root.namespace)
            epoch = self._forgets.epoch
            nodes = list(self.levels.walk(root, path))
            for node in nodes:
                self.levels.pin(node)
            found = [self.levels.use(node) for node in nodes]
            self.levels.count(len(path), found)
        found += self.disk.read(root, path, len(found))
        match = Match(root, path, tuple(found), epoch)
        if nodes:
            weakref.finalize(match, self._released.append, tuple(nodes)).atexit = False
        return match

    def known(self, root: Root, path: Path) -> int:
        """Tokens of the longest beginning of ``path`` in memory; counts no access."""
        with self._lock:
            return sum(node.step.tokens for node in self.levels.walk(root, path))

    def longest_chain(
        self, fingerprint: str, namespace: str, text: Ids, common: int, numbers: Mapping[str, Sequence[int]]
    ) -> tuple[int, ...]:
        """Numbers of the chunks that make the longest chain in memory below a prompt's first ``text``.

        The longest by tokens; of equal ones that after most of ``text``, of which only the first ``common``
        tokens must be the same. ``numbers`` are those of every chunk id. Any text may come between chunks.
        """
        blocks, best = blocks_of(text[:common], namespace), _NO_CHAIN
        with self._lock:
            self.disk.apply_forgets(namespace)
            for root, tops in self.levels.roots.items():
                if (root.fingerprint, root.namespace) == (fingerprint, namespace):
                    nodes = list(self.levels.walk(root, blocks))
                    if len(nodes) == len(blocks):
                        below = nodes[-1].children if nodes else tops
                        best = max(best, _longest_chain(below, text, common, numbers))
        return tuple(-number for number in best.numbers)

    def insert(self, match: Match, kvs: Sequence[ChunkKV] = (), *, new: int = 0) -> int:
        """Insert what a request computed after its ``match``: once per request, after the answer.

        ``kvs`` are those of the first steps that ``match`` did not find, in order, and are kept by reference.
        ``new`` is the number of tokens that the request computed. Returns how many of ``kvs`` are new in
        memory. ValueError, and nothing is inserted, for KV that is not exactly that step's.
        """
        steps, start = match.path[len(match) :], match.tokens
        if len(kvs) > len(steps):
            raise ValueError(f"{len(kvs)} KVs for the {len(steps)} steps that the tree did not have")
        for step, kv in zip(steps, kvs, strict=False):
            if reason := fault(kv, step, start):
                raise ValueError(f"not the exact KV of this step: {reason}")
            start += step.tokens
        seconds = self._cost(match.tokens, new) if self._cost is not None else float(new)
        missed = Access(False, seconds, new) if new else MISS
        with self._lock:
            self._unpin_released()
            self.disk.apply_forgets(match.root.namespace)
            if self._forgot(match):
                return 0
            added = self.levels.insert(match, kvs, missed)
        self.disk.write()
        return added

    def discard(self, root: Root, path: Path) -> None:
        """Drop the node at ``path``, whose KV cannot be used, from all tiers, and its subtree from memory."""
        with self._lock:
            nodes = list(self.levels.walk(root, path))
            if nodes and len(nodes) == len(path):
                self.levels.drop(nodes[-1])
            self.disk.discard(root, path)

    def forget(
        self, namespace: str, chunk_ids: frozenset[str] | None = None, texts: ForgottenTexts | None = None
    ) -> int:
        """Drop all nodes and turns with one of ``chunk_ids`` (texts' ids too) in their path, from all tiers.

        With ``texts`` also those whose tokens hold one of the texts, or end inside one, or are not known.
        Without ids the whole namespace is dropped. What running requests have computed of it, or after it, is
        not inserted. Trees of other processes on the same folder drop the namespace at their next look-up.
        """
        return self.disk.forget(namespace, chunk_ids, texts)

    def check_gpu(self) -> None:
        """Give up a GPU tier whose copies cannot be read any more; hot nodes have one on the host."""
        with self._lock:
            try:
                if self.levels.gpu is not None:
                    self.levels.gpu.probe()
            except RuntimeError:
                log.exception("the tree's GPU tier is lost; what is on the host is still used")
                self.levels.give_up_gpu()

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per tier, named ``tree:gpu``, ``tree:host``, ``tree:disk``, ``tree:turns``."""
        with self._lock:
            records = [*self.levels.lost, *(tier.stats() for tier in self.levels.tiers)]
        return (*records, *self.disk.stats(), *self.turns.stats())

    def close(self) -> None:
        """Write what is in memory to the disk, if there is one, and drop everything."""
        with self._lock:
            self.levels.clear()
        self.turns.clear()
        self.disk.close()

    def _unpin_released(self) -> None:
        while self._released:
            for node in self._released.popleft():
                self.levels.pin(node, -1)

    def _forgot(self, match: Match) -> bool:
        """Whether a forget since the look-up was about its path."""
        namespace, ids = match.root.namespace, [i for step in match.path for i in step.ids]
        tokens = [token for step in match.path for token in step.token_ids]
        known = tokens if len(tokens) == sum(step.tokens for step in match.path) else None
        return self._forgets.forgot_any(namespace, ids, match.epoch) or self._forgets.forgot_within(
            namespace, known, match.epoch, ends=True
        )

    def _drop(
        self, namespace: str, chunk_ids: frozenset[str] | None, texts: ForgottenTexts | None = None
    ) -> Dropped:
        """Forget in memory."""
        with self._lock:  # turns too, or a request could miss them and still match the nodes
            turns = self.turns.forget(namespace, chunk_ids, texts)
            if chunk_ids is not None and texts is not None:
                chunk_ids |= self.levels.holding(namespace, texts)
            self._forgets.add(namespace, chunk_ids, (), texts)
            tops = self.levels.about(namespace, chunk_ids)
            keys = [key_of(node.root, node.path()) for top in tops for node in top.subtree()]
            for node in tops:
                self.levels.drop(node)
            self.disk.drop_pending(namespace, chunk_ids, texts)
        return keys, turns, chunk_ids


class _Chain(NamedTuple):
    """Chunks in a row. Of two, the better one is greater."""

    tokens: int  # from the first chunk to the end of the last
    shared: int  # tokens of the first text that are as in the last prompt
    numbers: tuple[int, ...]  # negative


_NO_CHAIN = _Chain(0, 0, ())
_Children = Mapping[tuple[str, ...], Node]


def _longest_chain(
    children: _Children, text: Ids, common: int, numbers: Mapping[str, Sequence[int]]
) -> _Chain:
    """The best chain among ``children`` and below, where the blocks of ``text[:common]`` lead."""
    best, looks = _NO_CHAIN, 0
    # The first text so far is the second of each; what is below other text comes last.
    todo = deque[tuple[_Children, Ids, _Chain]]([(children, text[: common // BLOCK * BLOCK], best)])
    while todo:
        children, before, chain = todo.pop()
        for node in children.values():
            looks += 1
            if looks > MAX_LOOKS:
                return best
            step, tokens = node.step, chain.tokens + node.step.tokens
            if not step.document and chain.numbers:
                todo.appendleft((node.children, before, chain._replace(tokens=tokens)))
            elif not step.document:
                longer = (*before, *step.token_ids)
                if step.token_ids and longer[:common] == text[: min(common, len(longer))]:
                    todo.appendleft((node.children, longer, chain))
            elif chain.numbers or len(before) >= common:
                free = (-one for one in numbers.get(whole_id(step.ids[-1]), ()) if -one not in chain.numbers)
                if (number := next(free, None)) is not None:
                    shared = chain.shared or common_length(before, text)
                    after = _Chain(tokens, shared, (*chain.numbers, number))
                    todo.append((node.children, before, after))
                    best = max(best, after)
    return best


def open_tree(
    config: TreeConfig, device: torch.device, *, folder: pathlib.Path | None = None, cost: Cost | None = None
) -> KnowledgeTree:
    """A tree with the tiers that ``config`` asks for; no GPU tier where ``device`` is a CPU.

    ``folder`` is that of the chunk store's disk tier. ValueError for an unknown eviction policy or a disk
    tier without a folder, StoreError for an unusable one.
    """
    policy = partial(open_eviction, config.eviction)
    policy()  # a typo is an error even where no tier needs one
    disk: KVStore | None = None
    if config.disk_bytes:
        if folder is None:
            raise ValueError("the tree's disk_bytes need a StoreConfig with a disk_path")
        disk = DiskStore(folder / FOLDER, config.disk_bytes)
    on_gpu = device.type != "cpu"
    return KnowledgeTree(
        gpu_bytes=config.gpu_bytes if on_gpu else 0,
        host_bytes=config.host_bytes,
        device=device,
        disk=disk,
        policy=policy,
        cost=cost,
        turns_bytes=config.turns_bytes,
    )
