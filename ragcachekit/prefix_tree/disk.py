"""Disk tier of a knowledge tree: nodes evicted from memory, and forgets of other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from threading import RLock

from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.base import Path, Reused, Root, fault, key_of
from ragcachekit.prefix_tree.forget_log import ForgetLog, Ids
from ragcachekit.store.base import KVStore, StoreStats, concerns
from ragcachekit.store.null import NullStore
from ragcachekit.types import KVKey

DISK = "tree:disk"
FOLDER = "tree"
"""Folder of a tree's entries, in that of the chunk store's disk tier."""

FORGETS = "forgets"
"""Folder of the log of forgets, beside the entries."""


class TreeDisk:
    """Store of evicted nodes, written outside ``lock``, the tree's, which look-ups take.

    ``drop`` forgets in memory, :meth:`drop_pending` included; it returns the keys of the dropped nodes and
    the number of turns dropped.
    """

    def __init__(
        self, store: KVStore | None, lock: RLock, drop: Callable[[str, Ids], tuple[list[KVKey], int]]
    ) -> None:
        self._keeps = store is not None
        self.store = NullStore() if store is None else store
        folder = getattr(store, "folder", None)  # which other processes may share
        self._log = ForgetLog(folder / FORGETS) if folder is not None else None
        self._drop = drop
        self._pending: dict[KVKey, ChunkKV] = {}
        self._lock = lock
        self._writing = RLock()  # taken before the other one

    def read(self, root: Root, path: Path, known: int) -> Iterator[Reused]:
        """The steps after the first ``known``, as far as they are stored."""
        start = sum(step.tokens for step in path[:known])
        for number in range(known, len(path)):
            step, key = path[number], key_of(root, path[: number + 1])
            found = self.store.get(key) if key in self.store else None
            if found is None:
                return
            if fault(found.kv, step, start):
                self.store.discard(key)
                return
            yield Reused(step, found.kv, DISK)
            start += step.tokens

    def add(self, root: Root, path: Path, kv: ChunkKV) -> None:
        """Queue KV for the next :meth:`write`; the lock is held."""
        if self._keeps:
            self._pending[key_of(root, path)] = kv

    def discard(self, root: Root, path: Path) -> None:
        """Drop the entry of a path's last node, which cannot be used; the lock is held."""
        key = key_of(root, path)
        self._pending.pop(key, None)
        self.store.discard(key)

    def drop_pending(self, namespace: str, chunk_ids: Ids) -> None:
        """Remove what was forgotten from the queue; the lock is held."""
        for key in [key for key in self._pending if concerns(key, namespace, chunk_ids)]:
            del self._pending[key]

    def apply_forgets(self, namespace: str) -> None:
        """Forget what other processes on the same disk have forgotten; the lock is held."""
        for ids in self._log.unread(namespace) if self._log else ():
            self._drop(namespace, ids)

    def write(self) -> None:
        """Write the queue. Writes and forgets exclude each other, across processes too."""
        if not self._pending:
            return
        with self._writing, self._log.writing() if self._log else nullcontext(True) as may_write:
            with self._lock:
                for namespace in {key.namespace for key in self._pending}:
                    self.apply_forgets(namespace)
                pending, self._pending = self._pending, {}
            for key, kv in pending.items() if may_write else ():
                if key not in self.store:
                    self.store.put(key, kv.to("cpu"))

    def forget(self, namespace: str, chunk_ids: Ids) -> int:
        """Forget in memory, in the store and in other processes; returns the number of nodes and turns."""
        with self._writing, self._log.forgetting(namespace, chunk_ids) if self._log else nullcontext():
            keys, others = self._drop(namespace, chunk_ids)
            only_in_memory = sum(key not in self.store for key in keys)
            try:
                return others + only_in_memory + self.store.forget(namespace, chunk_ids)
            finally:
                self._drop(namespace, chunk_ids)  # what requests read from the disk meanwhile

    def stats(self) -> list[StoreStats]:
        """The store's records, under the tree's names."""
        if not self._keeps:
            return []
        return [replace(record, tier=f"tree:{record.tier}") for record in self.store.stats()]

    def close(self) -> None:
        """Write the rest and close the store."""
        self.write()
        self.store.close()
