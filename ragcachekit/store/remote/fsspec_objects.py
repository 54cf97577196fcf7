"""Sealed entries as objects in a folder of any fsspec file system."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from threading import Lock
from typing import Any

from fsspec.spec import AbstractFileSystem

from ragcachekit.store.base import concerns
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.store.entry.image import key_in
from ragcachekit.store.remote.base import hashed
from ragcachekit.store.remote.seal import OVERHEAD, body
from ragcachekit.types import KVKey

_ENDING = ".kv"
_TEMP = "tmp"
_HEAD = 64 << 10  # bytes in which a header is looked for
_ABANDONED = 3600.0  # seconds after which a temporary file is deleted
_KNOWN = 1 << 16  # keys in memory; of other objects, forgetting reads the header


class Objects:
    """One immutable object per entry, ``{root}/{name}.kv``, with names as in :func:`name_of`."""

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self._fs, self._root = fs, root.rstrip("/")
        self._local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
        # Object stores have no rename and show no half-written files.
        self._renames = type(fs).mv is not AbstractFileSystem.mv
        self._keys: dict[str, KVKey] = {}
        self._lock = Lock()  # around the keys, never while waiting for the file system

    def read(self, name: str) -> bytes:
        """The object; FileNotFoundError if there is none."""
        blob: bytes = self._fs.cat_file(self._path(name))
        return blob

    def write(self, key: KVKey, blob: memoryview) -> None:
        """Replace the object of ``key``; atomically where the file system has a rename."""
        path = self._path(name_of(key))
        if self._renames:
            # Only local files accept any buffer.
            self._rename_into(path, blob if self._local else bytes(blob))
        else:
            self._fs.pipe_file(path, bytes(blob))
        self._remember(name_of(key), key)

    def remove(self, name: str) -> None:
        """Delete the object, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))
        with self._lock:
            self._keys.pop(name, None)

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        return bool(self._fs.exists(self._path(name)))

    def concerned(self, namespace: str, chunk_ids: frozenset[str] | None) -> Iterator[str]:
        """Names of the objects that ``forget(namespace, chunk_ids)`` concerns, from a listing."""
        for name, nbytes in self.listing(hashed(namespace)).items():
            if chunk_ids is None or self._concerned(name, nbytes, namespace, chunk_ids):
                yield name

    def listing(self, group: str = "") -> dict[str, int]:
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

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}{_ENDING}"

    def _rename_into(self, path: str, blob: bytes | memoryview) -> None:
        temp = f"{self._root}/{_TEMP}/{secrets.token_hex(16)}"
        if self._local:
            os.makedirs(self._root, mode=0o700, exist_ok=True)  # text can be recovered from KV
        for file in (temp, path):
            self._fs.makedirs(file.rpartition("/")[0], exist_ok=True)
        try:
            self._fs.pipe_file(temp, blob)
            self._fs.mv(temp, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temp)
            raise

    def _remember(self, name: str, key: KVKey) -> None:
        with self._lock:
            self._keys[name] = key
            if len(self._keys) > _KNOWN:
                self._keys.pop(next(iter(self._keys)))

    def _concerned(self, name: str, nbytes: int, namespace: str, chunk_ids: frozenset[str]) -> bool:
        """Whether the object is to be forgotten; True if its header cannot be read."""
        try:
            with self._lock:
                key = self._keys.get(name)
            key = key or self._key_of(name, nbytes)
        except FileNotFoundError:
            return False
        except Exception:
            return True
        self._remember(name, key)
        return concerns(key, namespace, chunk_ids)

    def _key_of(self, name: str, nbytes: int) -> KVKey:
        """The key in the object's header, whose seal is not checked."""
        head = memoryview(self._fs.cat_file(self._path(name), start=0, end=min(nbytes, _HEAD)))
        key = key_in(body(head), nbytes - OVERHEAD)
        if name_of(key) != name:
            raise EntryDamaged("the entry of another key")
        return key


def name_of(key: KVKey) -> str:
    """``{hash of the namespace}/{digest}``."""
    return f"{hashed(key.namespace)}/{key.digest()}"


def _written(info: Mapping[str, Any]) -> float:
    """Modification time in seconds since the epoch, under the file system's own name for it."""
    for field in ("mtime", "LastModified", "last_modified", "updated", "created"):
        when = info.get(field)
        if isinstance(when, datetime):
            return when.timestamp()
        if isinstance(when, int | float):
            return float(when)
    return 0.0
