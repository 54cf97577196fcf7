"""A remote backend on a file system, within this process's byte budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Lock

from fsspec.spec import AbstractFileSystem

from ragcachekit.store.eviction.lru import Lru
from ragcachekit.store.eviction.ranking import Ranking
from ragcachekit.store.forget_epochs import ForgetEpochs
from ragcachekit.store.remote.base import Left, Saved, Usage, hashed
from ragcachekit.store.remote.fsspec_objects import Objects, name_of
from ragcachekit.types import KVKey

_MOST_WRITTEN = 1 << 16  # entries whose last write is remembered


class FsspecBackend:
    """Objects on a file system, with sizes and the order of use in memory after one listing.

    Reads ignore the index, and ``forget`` lists. Objects of other processes count from their first read.
    Another process may finish a write after the entry was forgotten here: forgotten entries are misses until
    this process writes them again. ``root`` is a folder without protocol. A write waits ``lock_wait`` seconds
    for another one to end.
    """

    def __init__(
        self, fs: AbstractFileSystem, root: str, budget: int, quotas: Mapping[str, int], lock_wait: float
    ) -> None:
        self._objects = Objects(fs, root)
        self._budget, self._lock_wait = budget, lock_wait
        self._quotas = {hashed(name): quota for name, quota in quotas.items() if name != "*"}
        self._other_quota = quotas.get("*")
        self._index: Ranking[str] = Ranking(Lru(), groups=True)
        self._lock = Lock()  # around the index, never while waiting for the file system
        self._changing = Lock()  # around writes and forgets
        self._listed = False
        self._forgets = ForgetEpochs()
        self._written: dict[str, int] = {}  # name → epoch of the last write here

    def load(self, key: KVKey) -> bytes | None:
        name = name_of(key)
        if self._hidden(key):
            return None
        try:
            blob = self._objects.read(name)
        except FileNotFoundError:
            with self._lock:
                self._index.remove(name)
            return None
        with self._lock:
            if name in self._index:
                self._index.touch(name)
            elif self._index.nbytes + len(blob) <= self._budget:  # another process's, if there is room
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
                    with self._lock:
                        self._add(name, len(blob))  # a half-written object counts until it is deleted
                    with suppress(Exception):
                        self._discard(name)
                raise
            self._wrote(name)
            with self._lock:
                self._add(name, len(blob))
            return Saved(True, evicted + self._make_room(name, len(blob)))  # reads may have added some

    def delete(self, key: KVKey) -> None:
        self._discard(name_of(key))

    def exists(self, key: KVKey) -> bool:
        return not self._hidden(key) and self._objects.exists(name_of(key))

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        failed: Exception | None = None
        with self._alone():
            self._forgets.add(namespace, chunk_ids)
            for name in self._objects.concerned(namespace, chunk_ids):
                try:
                    self._discard(name)
                    dropped.add(name.partition("/")[2])
                except Exception as error:
                    failed = error
        if failed is not None:
            raise Left(f"{type(failed).__name__}: {failed}") from failed

    def usage(self) -> Usage:
        if not self._listed:
            self.open()
        with self._lock:
            return Usage(len(self._index), self._index.nbytes)

    def open(self) -> int:
        """List the objects and evict down to the budget; returns how many."""
        with self._alone():
            return self._list()

    def close(self) -> None:
        """Nothing is held open."""

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._changing.acquire(timeout=self._lock_wait):
            raise TimeoutError("an earlier write has not ended")
        try:
            yield
        finally:
            self._changing.release()

    def _hidden(self, key: KVKey) -> bool:
        """Whether the entry was forgotten after this process last wrote it."""
        return self._forgets.forgot(key, self._written.get(name_of(key), 0))

    def _wrote(self, name: str) -> None:
        self._written[name] = self._forgets.now()
        if len(self._written) > _MOST_WRITTEN:
            self._written.pop(next(iter(self._written)), None)

    def _make_room(self, name: str, nbytes: int) -> int:
        """Evict until ``nbytes`` under ``name``, in place of what it has now, fit; returns how many."""
        evicted = 0
        while (victim := self._victim(name, nbytes)) is not None:
            try:
                self._discard(victim)
            except BaseException:
                with self._lock:
                    self._index.touch(victim)  # the next eviction tries another one
                raise
            evicted += 1
        return evicted

    def _victim(self, name: str, nbytes: int) -> str | None:
        """The next entry to evict for ``nbytes`` under ``name``; None once they fit."""
        group = _group_of(name)
        quota = self._quotas.get(group, self._other_quota)
        with self._lock:
            self._index.touch(name)  # not evicted for itself
            own = self._index.size(name) if name in self._index else 0
            if quota and self._index.nbytes_of(group) - own + nbytes > quota:
                return self._index.lowest(group)
            if self._index.nbytes - own + nbytes > self._budget:
                return self._index.lowest()
            return None

    def _add(self, name: str, nbytes: int) -> None:
        self._index.add(name, nbytes, group=_group_of(name))

    def _discard(self, name: str) -> None:
        self._objects.remove(name)
        with self._lock:
            self._index.remove(name)

    def _list(self) -> int:
        """Add the objects of earlier runs, oldest first; once."""
        if self._listed:
            return 0
        found = self._objects.listing()
        with self._lock:
            for name, nbytes in found.items():
                self._add(name, nbytes)
        self._listed = True  # before evicting, which may fail and is continued by the next write
        return self._make_room("", 0)


def _group_of(name: str) -> str:
    """The hash of the namespace that an object belongs to."""
    return name.partition("/")[0]
