"""Sealed entries as objects on any file system that fsspec knows."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from threading import Lock
from typing import Any

from fsspec.spec import AbstractFileSystem

from ragcachekit.store.base import concerns
from ragcachekit.store.entry_bytes import key_in
from ragcachekit.store.entry_header import EntryDamaged
from ragcachekit.store.eviction.lru import Lru
from ragcachekit.store.eviction.ranking import Ranking
from ragcachekit.store.remote_base import Saved, Usage, hashed
from ragcachekit.store.seal import OVERHEAD, body
from ragcachekit.types import KVKey

_ENDING = ".kv"
_TEMP = "tmp"
_BEGINNING = 64 << 10  # bytes that hold most headers
_ABANDONED = 3600.0  # seconds after which a temporary file has no writer any more


class FsspecBackend:
    """One immutable object per entry, ``{root}/{hash of the namespace}/{digest}.kv``.

    The objects are the truth: a read asks for the object whatever the bookkeeping says, and ``forget``
    lists. Sizes and the order of use are kept in memory, from one listing on; objects of other processes
    count from their first read here.

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

    def __init__(
        self, fs: AbstractFileSystem, root: str, budget: int, quotas: Mapping[str, int], patience: float
    ) -> None:
        self._fs, self._root = fs, root.rstrip("/")
        self._budget, self._patience = budget, patience
        self._quotas = {hashed(name): quota for name, quota in quotas.items() if name != "*"}
        self._other_quota = quotas.get("*")
        # File systems with a rename of their own show half-written files; object stores do neither.
        self._renames = type(fs).mv is not AbstractFileSystem.mv
        self._index: Ranking[str] = Ranking(Lru(), groups=True)
        self._keys: dict[str, KVKey] = {}
        self._lock = Lock()  # around the bookkeeping, never while waiting for the file system
        self._changing = Lock()  # around writes and forgets
        self._listed = False

    def load(self, key: KVKey) -> bytes | None:
        name = _name(key)
        try:
            blob: bytes = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            self._gone(name)
            return None
        with self._lock:
            if name in self._index:
                self._index.touch(name)
                return blob
        # Another process wrote it. It counts from now on, unless that costs somebody else's place.
        with self._lock:
            if self._index.nbytes + len(blob) <= self._budget:
                self._add(name, len(blob), key)
        return blob

    def save(self, key: KVKey, blob: bytearray, wanted: Callable[[], bool]) -> Saved:
        name = _name(key)
        with self._alone():
            self._list()
            evicted = self._make_room(name, len(blob))
            if not wanted():
                return Saved(False, evicted)
            try:
                self._write(name, bytes(blob))
            except BaseException:
                if name not in self._index:
                    self._remove_or_count(name, len(blob), key)
                raise
            with self._lock:
                self._add(name, len(blob), key)
            return Saved(True, evicted + self._make_room(name, len(blob)))  # reads may have added some

    def delete(self, key: KVKey) -> None:
        self._discard(_name(key))

    def exists(self, key: KVKey) -> bool:
        return bool(self._fs.exists(self._path(_name(key))))

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        with self._alone():
            for name, nbytes in self._listing(hashed(namespace)).items():
                if chunk_ids is None or self._concerned(name, nbytes, namespace, chunk_ids):
                    self._discard(name)
                    dropped.add(name.partition("/")[2])

    def usage(self) -> Usage:
        if not self._listed:
            self.open()
        with self._lock:
            return Usage(len(self._index), self._index.nbytes)

    def open(self) -> int:
        """List what is there, drop what exceeds the budget and what dead writers left; returns how many."""
        with self._alone():
            return self._list()

    def close(self) -> None:
        """Nothing is held open."""

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._changing.acquire(timeout=self._patience):
            raise TimeoutError("an earlier write has not ended")
        try:
            yield
        finally:
            self._changing.release()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}{_ENDING}"

    def _write(self, name: str, blob: bytes) -> None:
        if not self._renames:
            self._fs.pipe_file(self._path(name), blob)
            return
        temp = f"{self._root}/{_TEMP}/{secrets.token_hex(16)}"
        for folder in (_TEMP, name.partition("/")[0]):
            self._make_folder(f"{self._root}/{folder}")
        try:
            self._fs.pipe_file(temp, blob)
            self._fs.mv(temp, self._path(name))
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temp)
            raise

    def _make_folder(self, path: str) -> None:
        if "file" in _protocols(self._fs):
            os.makedirs(self._root, mode=0o700, exist_ok=True)  # KV says what the documents say
        self._fs.makedirs(path, exist_ok=True)

    def _make_room(self, name: str, nbytes: int) -> int:
        """Evict until ``nbytes`` under ``name``, in place of what it has now, fit; returns how many."""
        evicted = 0
        while (victim := self._victim(name, nbytes)) is not None:
            try:
                self._discard(victim)  # it counts until the object has gone
            except BaseException:
                with self._lock:
                    self._index.touch(victim)  # one that cannot be deleted is not asked for every time
                raise
            evicted += 1
        return evicted

    def _victim(self, name: str, nbytes: int) -> str | None:
        """Who has to leave next for ``nbytes`` under ``name``; None once they fit."""
        group = name.partition("/")[0]
        quota = self._quotas.get(group, self._other_quota)
        with self._lock:
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

    def _add(self, name: str, nbytes: int, key: KVKey | None) -> None:
        self._index.add(name, nbytes, group=name.partition("/")[0])
        if key is not None:
            self._keys[name] = key

    def _gone(self, name: str) -> None:
        with self._lock:
            self._index.remove(name)
            self._keys.pop(name, None)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _remove_or_count(self, name: str, nbytes: int, key: KVKey) -> None:
        """After a failed write: an object that nobody accounts for would escape the budget."""
        try:
            self._remove(name)
        except Exception:
            with self._lock:
                self._add(name, nbytes, key)

    def _discard(self, name: str) -> None:
        self._remove(name)
        self._gone(name)

    def _concerned(self, name: str, nbytes: int, namespace: str, chunk_ids: frozenset[str]) -> bool:
        """Whether the object is to be forgotten; one that cannot be read as an entry is nobody's loss."""
        with self._lock:
            key = self._keys.get(name)
        try:
            key = key or self._key_of(name, nbytes)
        except FileNotFoundError:
            return False
        except EntryDamaged:
            return True
        with self._lock:
            if name in self._index:
                self._keys[name] = key
        return concerns(key, namespace, chunk_ids)

    def _key_of(self, name: str, nbytes: int) -> KVKey:
        """What the object says of itself. Its seal is not checked: if this is a lie, it is never served."""
        path = self._path(name)
        beginning = memoryview(self._fs.cat_file(path, start=0, end=min(nbytes, _BEGINNING)))
        key = key_in(body(beginning), nbytes - OVERHEAD)
        if key is None:
            key = key_in(body(memoryview(self._fs.cat_file(path))), nbytes - OVERHEAD)
        if key is None or _name(key) != name:
            raise EntryDamaged("the entry of another key")
        return key

    def _list(self) -> int:
        """Take in what earlier runs left, oldest first; once."""
        if self._listed:
            return 0
        found = self._listing()
        with self._lock:
            for name, nbytes in found.items():
                self._add(name, nbytes, None)
        self._listed = True  # also if not all of what is too much can be deleted: the next write goes on
        return self._make_room("", 0)

    def _listing(self, group: str = "") -> dict[str, int]:
        """Name → size of every object, of one namespace where one is named, the last written last."""
        folder = f"{self._root}/{group}" if group else self._root
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(folder, detail=True)
        except FileNotFoundError:
            return {}
        finally:
            self._fs.invalidate_cache()  # or `exists` would answer from this listing for ever
        rows = []
        for path, info in found.items():
            parts = path.split("/")
            name = "/".join(parts[-2:]).removesuffix(_ENDING)
            if path.endswith(_ENDING):
                rows.append((_written(info), name, int(info["size"])))
            elif parts[-2] == _TEMP and _written(info) < time.time() - _ABANDONED:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(path)
        return {name: nbytes for _, name, nbytes in sorted(rows)}


def _name(key: KVKey) -> str:
    return f"{hashed(key.namespace)}/{key.digest()}"


def _protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _written(info: Mapping[str, Any]) -> float:
    """Seconds since the epoch at which an object was written, under whatever name the file system has."""
    for field in ("mtime", "LastModified", "last_modified", "updated", "created"):
        when = info.get(field)
        if isinstance(when, datetime):
            return when.timestamp()
        if isinstance(when, int | float):
            return float(when)
    return 0.0
