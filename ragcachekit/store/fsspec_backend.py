"""The bulk tier of a process that keeps its own books."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

from fsspec.spec import AbstractFileSystem

from ragcachekit.store.eviction.lru import Lru
from ragcachekit.store.eviction.ranking import Ranking
from ragcachekit.store.fsspec_objects import Objects, group_of, name_of
from ragcachekit.store.process import PerProcess
from ragcachekit.store.remote_base import Saved, Usage, Writes, hashed
from ragcachekit.types import KVKey


class FsspecBackend:
    """Objects on a file system; sizes and the order of use in memory, from one listing on.

    The objects are the truth: a read asks for the object whatever the bookkeeping says, and ``forget``
    lists. Objects of other processes count from their first read here. Where processes have a Redis
    server in common, :class:`~ragcachekit.store.booked_backend.BookedBackend` keeps one account for all.

    Parameters
    ----------
    fs : fsspec.AbstractFileSystem
    root : str
        A folder of it, without protocol.
    budget : int
    quotas : mapping of str to int
    patience : float
        Seconds that a write waits for another one to end.
    """

    hears = True

    def __init__(
        self, fs: AbstractFileSystem, root: str, budget: int, quotas: Mapping[str, int], patience: float
    ) -> None:
        self._objects = Objects(fs, root)
        self._budget, self._patience = budget, patience
        self._quotas = {hashed(name): quota for name, quota in quotas.items() if name != "*"}
        self._other_quota = quotas.get("*")
        self._index: Ranking[str] = Ranking(Lru(), groups=True)
        self._locks = PerProcess(Lock)  # around the bookkeeping, never while waiting for the file system
        self._changing = PerProcess(Lock)  # around writes and forgets
        self._listed = False

    def load(self, key: KVKey) -> bytes | None:
        name = name_of(key)
        try:
            blob = self._objects.read(name)
        except FileNotFoundError:
            self._gone(name)
            return None
        with self._locks.get():
            if name in self._index:
                self._index.touch(name)
                return blob
        # Another process wrote it. It counts from now on, unless that costs somebody else's place.
        with self._locks.get():
            if self._index.nbytes + len(blob) <= self._budget:
                self._add(name, len(blob))
        return blob

    def save(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> Saved:
        name = name_of(key)
        with self._alone():
            self._list()
            evicted = self._make_room(name, len(blob))
            if not wanted():
                return Saved(False, evicted)
            try:
                self._objects.write(key, blob)
            except BaseException:
                if name not in self._index:
                    self._remove_or_count(name, len(blob))
                raise
            with self._locks.get():
                self._add(name, len(blob))
            return Saved(True, evicted + self._make_room(name, len(blob)))  # reads may have added some

    def delete(self, key: KVKey) -> None:
        self._discard(name_of(key))

    def exists(self, key: KVKey) -> bool:
        return self._objects.exists(name_of(key))

    def forget(
        self,
        namespace: str,
        chunk_ids: frozenset[str] | None,
        dropped: set[str],
        awaits: Writes = frozenset(),
    ) -> None:
        def removed(name: str) -> None:
            self._gone(name)
            dropped.add(name.partition("/")[2])

        with self._alone():
            self._objects.remove_all(self._objects.concerned(namespace, chunk_ids), removed)

    def usage(self) -> Usage:
        if not self._listed:
            self.open()
        with self._locks.get():
            return Usage(len(self._index), self._index.nbytes)

    def open(self) -> int:
        """List what is there, drop what exceeds the budget and what dead writers left; returns how many."""
        with self._alone():
            return self._list()

    def close(self) -> None:
        """Nothing is held open."""

    @contextmanager
    def _alone(self) -> Iterator[None]:
        changing = self._changing.get()
        if not changing.acquire(timeout=self._patience):
            raise TimeoutError("an earlier write has not ended")
        try:
            yield
        finally:
            changing.release()

    def _make_room(self, name: str, nbytes: int) -> int:
        """Evict until ``nbytes`` under ``name``, in place of what it has now, fit; returns how many."""
        evicted = 0
        while (victim := self._victim(name, nbytes)) is not None:
            try:
                self._discard(victim)  # it counts until the object has gone
            except BaseException:
                with self._locks.get():
                    self._index.touch(victim)  # one that cannot be deleted is not asked for every time
                raise
            evicted += 1
        return evicted

    def _victim(self, name: str, nbytes: int) -> str | None:
        """Who has to leave next for ``nbytes`` under ``name``; None once they fit."""
        group = group_of(name)
        quota = self._quotas.get(group, self._other_quota)
        with self._locks.get():
            self._index.touch(name)  # now last in line: what it has now is not evicted for itself
            own = self._index.size(name) if name in self._index else 0
            if quota and self._index.nbytes_of(group) - own + nbytes > quota:
                victim = self._index.lowest(group)
            elif self._index.nbytes - own + nbytes > self._budget:
                victim = self._index.lowest()
            else:
                return None
        assert victim is not None, "an entry within its limits never has to leave for itself"
        return victim

    def _add(self, name: str, nbytes: int) -> None:
        self._index.add(name, nbytes, group=group_of(name))

    def _gone(self, name: str) -> None:
        with self._locks.get():
            self._index.remove(name)

    def _remove_or_count(self, name: str, nbytes: int) -> None:
        """After a failed write: an object that nobody accounts for would escape the budget."""
        try:
            self._objects.remove(name)
        except Exception:
            with self._locks.get():
                self._add(name, nbytes)

    def _discard(self, name: str) -> None:
        self._objects.remove(name)
        self._gone(name)

    def _list(self) -> int:
        """Take in what earlier runs left, oldest first; once."""
        if self._listed:
            return 0
        found = self._objects.listing()
        with self._locks.get():
            for name, nbytes in found.items():
                self._add(name, nbytes)
        self._listed = True  # also if not all of what is too much can be deleted: the next write goes on
        return self._make_room("", 0)
