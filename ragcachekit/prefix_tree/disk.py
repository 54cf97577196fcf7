"""The disk below a knowledge tree: what left its memory, and what other processes have forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path as FolderPath
from threading import RLock
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.base import Path, Reused, Root, fault, key_of
from ragcachekit.store.base import KVStore, StoreStats, concerns
from ragcachekit.types import KVKey

if TYPE_CHECKING:
    from ragcachekit.prefix_tree.forget_log import ForgetLog

DISK = "tree:disk"
FOLDER = "tree"
"""Where a tree keeps its entries, in the folder of the chunk store's disk tier."""

FORGETS = "forgets"
"""Where it keeps beside them what was forgotten."""

Ids = frozenset[str] | None
"""What ``forget`` was told: segment ids, or None for the whole namespace."""


class TreeDisk:
    """Keeps what left memory in a store, and writes it outside the lock that look-ups take.

    Parameters
    ----------
    store : KVStore or None
        None keeps nothing.
    lock : RLock
        The tree's. Methods that say so are called while it is held.
    drop : callable
        Has the tree forget in memory, :meth:`let_go` included; returns the keys of the nodes that went, and
        how much else did.
    """

    def __init__(
        self, store: KVStore | None, lock: RLock, drop: Callable[[str, Ids], tuple[list[KVKey], int]]
    ) -> None:
        self.store = store
        self._forgets = _forgets_of(store)
        self._drop = drop
        self._leaving: list[tuple[Root, Path, ChunkKV]] = []
        self._lock = lock
        self._writing = RLock()  # taken before the other one

    def read(self, root: Root, path: Path, known: int) -> Iterator[Reused]:
        """The steps behind the first ``known``, as long as they are here."""
        if self.store is None:
            return
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

    def leave(self, root: Root, path: Path, kv: ChunkKV) -> None:
        """Have KV written with the next :meth:`write`; the lock is held."""
        if self.store is not None:
            self._leaving.append((root, path, kv))

    def discard(self, root: Root, path: Path) -> None:
        """Drop the entry of a path's last node, which cannot be used; the lock is held."""
        key = key_of(root, path)
        self._leaving = [left for left in self._leaving if key_of(*left[:2]) != key]
        if self.store is not None:
            self.store.discard(key)

    def let_go(self, namespace: str, chunk_ids: Ids) -> None:
        """Do not write what was forgotten; the lock is held."""
        self._leaving = [
            left for left in self._leaving if not concerns(key_of(*left[:2]), namespace, chunk_ids)
        ]

    def hear(self, namespace: str) -> None:
        """Forget what other processes on the same disk have forgotten; the lock is held."""
        for ids in self._forgets.news(namespace) if self._forgets else ():
            self._drop(namespace, ids)

    def write(self) -> None:
        """Write what left memory. A ``forget`` waits for it, and it for a ``forget``, of any process."""
        if self.store is None or not self._leaving:
            return
        with self._writing, self._forgets.writing() if self._forgets else nullcontext(True) as may_write:
            with self._lock:
                for namespace in {root.namespace for root, _, _ in self._leaving}:
                    self.hear(namespace)
                leaving, self._leaving = self._leaving, []
            for root, path, kv in leaving if may_write else ():
                key = key_of(root, path)
                if key not in self.store:
                    self.store.put(key, kv.to("cpu"))

    def forget(self, namespace: str, chunk_ids: Ids) -> int:
        """Forget in memory and in the store, and have other processes hear of it; returns how much that was.

        Nobody writes meanwhile.
        """
        with (
            self._writing,
            self._forgets.forgetting(namespace, chunk_ids) if self._forgets else nullcontext(),
        ):
            keys, others = self._drop(namespace, chunk_ids)
            if self.store is None:
                return others + len(keys)
            only_in_memory = sum(key not in self.store for key in keys)
            try:
                return others + only_in_memory + self.store.forget(namespace, chunk_ids)
            finally:
                self._drop(namespace, chunk_ids)  # what requests have found on the disk in between

    def stats(self) -> list[StoreStats]:
        """The store's records, under the tree's names."""
        if self.store is None:
            return []
        return [replace(record, tier=f"tree:{record.tier}") for record in self.store.stats()]

    def close(self) -> None:
        """Write the rest and close the store."""
        self.write()
        if self.store is not None:
            self.store.close()


@runtime_checkable
class _OnFolder(Protocol):
    """A store whose folder other processes may share."""

    folder: FolderPath


def _forgets_of(disk: KVStore | None) -> ForgetLog | None:
    if not isinstance(disk, _OnFolder):
        return None
    from ragcachekit.prefix_tree.forget_log import ForgetLog

    return ForgetLog(disk.folder / FORGETS)
