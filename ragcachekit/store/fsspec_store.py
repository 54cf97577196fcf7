"""The bulk tier: one sealed object per entry on any fsspec file system."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from threading import Lock
from typing import Any

from ragcachekit.errors import StoreError, missing_extra
from ragcachekit.store.base import concerns, quota_of
from ragcachekit.store.entry import EntryDamaged, hashed
from ragcachekit.store.eviction import Lru, Ranking
from ragcachekit.store.remote import RemoteStore, Usage, key_of_sealed
from ragcachekit.types import KVKey

_ENDING = ".kv"
_TEMP = "tmp"
_HEAD = 64 << 10  # bytes in which a header is looked for
_ABANDONED = 3600.0  # seconds after which a temporary file is deleted


class FsspecStore(RemoteStore):
    """Chunk KV as objects in a folder of a local, network or object store.

    The budget is this process's own: the folder is listed when it is opened, and what this process writes
    and reads counts from then on. Several writers of one folder can together exceed it; give each its own
    folder or share.

    Parameters
    ----------
    url : str
        ``s3://bucket/kv``, ``file:///mnt/kv``, ``memory://kv`` or any other fsspec url.
    budget, key, deadline, quotas
        As in :class:`RemoteStore`.

    Raises ValueError for a bad url or key, and StoreError if fsspec, or what it needs for this url,
    is not installed.
    """

    def __init__(
        self,
        url: str,
        budget: int,
        *,
        key: bytes | str | None,
        deadline: float,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        try:
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(url)
        except ImportError as error:
            raise StoreError(
                f"the bulk tier needs fsspec and what it names for this url ({error}): "
                f"{missing_extra('fsspec', 'fsspec')}, for s3:// {missing_extra('s3', 's3fs')}, "
                "or use bulk_url=None"
            ) from error
        backend = FsspecBackend(fs, root, budget, quotas or {}, deadline)
        super().__init__("bulk", backend, key=key, deadline=deadline, budget=budget, quotas=quotas)


class FsspecBackend:
    """One immutable object per entry, ``{root}/{name}.kv``, with names as in :func:`name_of`.

    Sizes, order of use and keys are in memory after one listing. Reads ignore that index, and ``forget``
    lists. Objects of other processes count from their first read; one that others deleted counts until it
    would be evicted. ``root`` is a folder without protocol. A write waits ``lock_wait`` seconds for another
    one to end.
    """

    def __init__(self, fs: Any, root: str, budget: int, quotas: Mapping[str, int], lock_wait: float) -> None:
        from fsspec.spec import AbstractFileSystem

        self._fs, self._root = fs, root.rstrip("/")
        self._local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
        # Object stores have no rename and show no half-written files.
        self._renames = type(fs).mv is not AbstractFileSystem.mv
        self._budget, self._quotas, self._lock_wait = budget, quotas, lock_wait
        self._index: Ranking[str] = Ranking(Lru())
        self._keys: dict[str, KVKey] = {}  # known of the index; of others, forgetting reads the header
        self._lock = Lock()  # around both, never while waiting for the file system
        self._changing = Lock()  # around writes, deletions and forgets
        self._listed = False

    def open(self) -> None:
        with self._alone():
            self._list()

    def load(self, key: KVKey) -> bytes | None:
        name = name_of(key)
        try:
            blob: bytes = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        with self._lock:
            if name in self._index:
                self._index.touch(name)
            elif self._index.nbytes + len(blob) <= self._budget:  # another process's, if there is room
                self._index.add(name, len(blob), _group_of(name))
        return blob

    def save(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> int | None:
        name, quota = name_of(key), quota_of(self._quotas, key.namespace)
        with self._alone():
            self._list()
            evicted = self._make_room(name, len(blob), quota)
            if not wanted():
                return None
            with self._lock:  # before it is written, since what cannot be deleted again counts as well
                self._index.add(name, len(blob), _group_of(name))
                self._keys[name] = key
            try:
                self._write(self._path(name), blob)
            except BaseException:
                with suppress(Exception):
                    self._discard(name)
                raise
            return evicted + self._make_room(name, len(blob), quota)  # reads may have added some

    def delete(self, key: KVKey) -> None:
        with self._alone():
            self._discard(name_of(key))

    def exists(self, key: KVKey) -> bool:
        return bool(self._fs.exists(self._path(name_of(key))))

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        failed: Exception | None = None
        with self._alone():
            for name, nbytes in self._listing(hashed(namespace)).items():
                if chunk_ids is None or self._concerned(name, nbytes, namespace, chunk_ids):
                    try:
                        self._discard(name)
                        dropped.add(name.partition("/")[2])
                    except Exception as error:
                        failed = error
        if failed is not None:
            raise failed

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._index), self._index.nbytes, self._budget)

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

    # -- room --------------------------------------------------------------------------------------

    def _make_room(self, name: str, nbytes: int, quota: int | None) -> int:
        """Evict until ``nbytes`` under ``name``, in place of what it has now, fit; returns how many."""
        evicted = 0
        while (victim := self._victim(name, nbytes, quota)) is not None:
            try:
                self._discard(victim)
            except BaseException:
                with self._lock:
                    self._index.touch(victim)  # the next eviction tries another one
                raise
            evicted += 1
        return evicted

    def _victim(self, name: str, nbytes: int, quota: int | None) -> str | None:
        """The next entry to evict for ``nbytes`` under ``name``; None once they fit."""
        group = _group_of(name)
        with self._lock:
            self._index.touch(name)  # not evicted for itself
            own = self._index.record(name).nbytes if name in self._index else 0
            if quota and self._index.nbytes_of(group) - own + nbytes > quota:
                return self._index.lowest(group)
            if self._index.nbytes - own + nbytes > self._budget:
                return self._index.lowest()
            return None

    def _list(self) -> None:
        """Add the objects of earlier runs, oldest first, and evict down to the budget; once."""
        if self._listed:
            return
        found = self._listing()
        with self._lock:
            for name, nbytes in found.items():
                self._index.add(name, nbytes, _group_of(name))
        self._listed = True  # before evicting, which may fail and is continued by the next write
        self._make_room("", 0, None)

    # -- objects -----------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}{_ENDING}"

    def _write(self, path: str, blob: memoryview) -> None:
        """Replace an object; atomically where the file system has a rename."""
        if not self._renames:
            self._fs.pipe_file(path, bytes(blob))
            return
        temp = f"{self._root}/{_TEMP}/{secrets.token_hex(16)}"
        if self._local:
            os.makedirs(self._root, mode=0o700, exist_ok=True)  # text can be recovered from KV
        for file in (temp, path):
            self._fs.makedirs(file.rpartition("/")[0], exist_ok=True)
        try:
            # Only local files accept any buffer.
            self._fs.pipe_file(temp, blob if self._local else bytes(blob))
            self._fs.mv(temp, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temp)
            raise

    def _discard(self, name: str) -> None:
        """Delete an object; the caller is the only one that writes."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))
        with self._lock:
            self._index.remove(name)
            self._keys.pop(name, None)

    def _listing(self, group: str = "") -> dict[str, int]:
        """Name → size of every object (of one hashed namespace), oldest first; deletes old temporaries."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(f"{self._root}/{group}" if group else self._root, detail=True)
        except FileNotFoundError:
            return {}
        finally:
            self._fs.invalidate_cache()  # or `exists` would answer from this listing
        rows = []
        for path, info in found.items():
            # Others may use the folder as well.
            folder, _, file = path.removeprefix(self._root).strip("/").partition("/")
            if file.endswith(_ENDING) and "/" not in file:
                rows.append((_written(info), f"{folder}/{file.removesuffix(_ENDING)}", int(info["size"])))
            elif folder == _TEMP and file and _written(info) < time.time() - _ABANDONED:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(path)
        return {name: nbytes for _, name, nbytes in sorted(rows)}

    def _concerned(self, name: str, nbytes: int, namespace: str, chunk_ids: frozenset[str]) -> bool:
        """Whether the object is to be forgotten; True if its header cannot be read."""
        try:
            key = self._keys.get(name) or self._key_of(name, nbytes)
        except FileNotFoundError:
            return False
        except Exception:
            return True
        with self._lock:
            if name in self._index:
                self._keys[name] = key
        return concerns(key, namespace, chunk_ids)

    def _key_of(self, name: str, nbytes: int) -> KVKey:
        """The key in the object's header, whose seal is not checked."""
        head = self._fs.cat_file(self._path(name), start=0, end=min(nbytes, _HEAD))
        key = key_of_sealed(head, nbytes)
        if name_of(key) != name:
            raise EntryDamaged("the entry of another key")
        return key


def name_of(key: KVKey) -> str:
    """``{hash of the namespace}/{digest}``."""
    return f"{hashed(key.namespace)}/{key.digest()}"


def _group_of(name: str) -> str:
    """The hash of the namespace that an object belongs to."""
    return name.partition("/")[0]


def _written(info: Mapping[str, Any]) -> float:
    """Modification time in seconds since the epoch, under the file system's own name for it."""
    for field in ("mtime", "LastModified", "last_modified", "updated", "created"):
        when = info.get(field)
        if isinstance(when, datetime):
            return when.timestamp()
        if isinstance(when, int | float):
            return float(when)
    return 0.0
