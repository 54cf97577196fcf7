"""Sealed entries as objects in a folder of any file system that fsspec knows."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from threading import Lock
from typing import Any

from fsspec.spec import AbstractFileSystem

from ragcachekit.store.base import concerns
from ragcachekit.store.entry_bytes import key_in
from ragcachekit.store.entry_header import EntryDamaged
from ragcachekit.store.process import PerProcess
from ragcachekit.store.remote_base import Left, hashed
from ragcachekit.store.seal import OVERHEAD, body
from ragcachekit.types import KVKey

_ENDING = ".kv"
_TEMP = "tmp"
_MARK = "books.id"
_BEGINNING = 64 << 10  # bytes that hold most headers
_ABANDONED = 3600.0  # seconds after which a temporary file has no writer any more
_KNOWN = 1 << 16  # keys that are remembered; of other objects, forgetting reads the header
_HOPELESS = 8  # objects that cannot be deleted, one after the other, before the rest is not tried


class Objects:
    """One immutable object per entry, ``{root}/{hash of the namespace}/{digest}.kv``.

    Named ``{hash of the namespace}/{digest}`` here. Whoever deletes, forgets or lists sees what is there,
    whoever wrote it.

    Parameters
    ----------
    fs : fsspec.AbstractFileSystem
    root : str
        A folder of it, without protocol.
    """

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self._fs, self.root = fs, root.rstrip("/")
        # File systems with a rename of their own show half-written files; object stores do neither.
        self.renames = type(fs).mv is not AbstractFileSystem.mv
        self._keys: OrderedDict[str, KVKey] = OrderedDict()
        self._locks = PerProcess(Lock)  # around the keys, never while waiting for the file system

    def read(self, name: str) -> bytes:
        """The object; FileNotFoundError if there is none."""
        blob: bytes = self._fs.cat_file(self._path(name))
        return blob

    def write(self, key: KVKey, blob: memoryview) -> None:
        """Write the object of ``key`` in place of the one that is there, whole where the system renames."""
        # Files take the buffer as it is; who sends requests may not, and copies before it sends.
        self._put(self._path(name_of(key)), blob if "file" in _protocols(self._fs) else bytes(blob))
        self._remember(name_of(key), key)

    def remove(self, name: str) -> None:
        """Delete the object, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))
        with self._locks.get():
            self._keys.pop(name, None)

    def remove_all(self, names: Iterable[str], removed: Callable[[str], object]) -> None:
        """Delete objects, telling each that went.

        Raises
        ------
        Left
            At the end, if some could not be deleted.
        Exception
            What the file system raises, if it is so for eight in a row.
        """
        left: Exception | None = None
        row = 0
        for name in names:
            try:
                self.remove(name)
            except Exception as error:
                left, row = error, row + 1
                if row == _HOPELESS:
                    raise
            else:
                row = 0
                removed(name)
        if left is not None:
            raise Left(f"{type(left).__name__}: {left}") from left

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        return bool(self._fs.exists(self._path(name)))

    def concerned(self, namespace: str, chunk_ids: frozenset[str] | None) -> Iterator[str]:
        """Names of the objects that ``forget(namespace, chunk_ids)`` is about, from a listing."""
        for name, nbytes in self.listing(hashed(namespace)).items():
            if chunk_ids is None or self._concerned(name, nbytes, namespace, chunk_ids):
                yield name

    def listing(self, group: str = "") -> dict[str, int]:
        """Name → size of every object, of one namespace where its hash is given, the last written last.

        Temporary files of writers that are long dead go.
        """
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(f"{self.root}/{group}" if group else self.root, detail=True)
        except FileNotFoundError:
            return {}
        finally:
            self._fs.invalidate_cache()  # or `exists` would answer from this listing for ever
        rows = []
        for path, info in found.items():
            # Exactly as deep as our own: the root may be a folder that others use as well.
            folder, _, file = path.removeprefix(self.root).strip("/").partition("/")
            if file.endswith(_ENDING) and "/" not in file:
                rows.append((_written(info), f"{folder}/{file.removesuffix(_ENDING)}", int(info["size"])))
            elif folder == _TEMP and file and _written(info) < time.time() - _ABANDONED:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(path)
        return {name: nbytes for _, name, nbytes in sorted(rows)}

    def mark(self) -> str | None:
        """What tells this folder from all others, however it is reached; None if it has no (whole) mark."""
        try:
            text = self._fs.cat_file(f"{self.root}/{_MARK}").decode("ascii", "replace")
        except FileNotFoundError:
            return None
        return text if re.fullmatch("[0-9a-f]{32}", text) else None

    def make_mark(self) -> str:
        """Mark the folder, unless another process was quicker; the mark that it has now."""
        path, mark = f"{self.root}/{_MARK}", secrets.token_hex(16)
        if "file" in _protocols(self._fs) and self._made(path, mark):
            return mark
        there = self.mark()
        if there is None:  # none, or the half of one
            self._put(path, mark.encode())
            there = self.mark()
        return there or mark

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}{_ENDING}"

    def _put(self, path: str, blob: bytes | memoryview) -> None:
        if not self.renames:
            self._fs.pipe_file(path, blob)
            return
        temp = f"{self.root}/{_TEMP}/{secrets.token_hex(16)}"
        for file in (temp, path):
            self._make_folder(file.rpartition("/")[0])
        try:
            self._fs.pipe_file(temp, blob)
            self._fs.mv(temp, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temp)
            raise

    def _made(self, path: str, text: str) -> bool:
        """Make a file whole and only if there is none; False if there is, or the file system cannot."""
        temp = f"{self.root}/{_TEMP}/{secrets.token_hex(16)}"
        self._make_folder(temp.rpartition("/")[0])
        try:
            self._fs.pipe_file(temp, text.encode())
            os.link(temp, path)
        except OSError:
            return False
        finally:
            with suppress(OSError):
                os.unlink(temp)
        return True

    def _remember(self, name: str, key: KVKey) -> None:
        with self._locks.get():
            self._keys[name] = key
            self._keys.move_to_end(name)
            if len(self._keys) > _KNOWN:
                self._keys.popitem(last=False)

    def _make_folder(self, path: str) -> None:
        if "file" in _protocols(self._fs):
            os.makedirs(self.root, mode=0o700, exist_ok=True)  # KV says what the documents say
        self._fs.makedirs(path, exist_ok=True)

    def _concerned(self, name: str, nbytes: int, namespace: str, chunk_ids: frozenset[str]) -> bool:
        """Whether the object is to be forgotten; one that cannot be read as an entry is nobody's loss."""
        with self._locks.get():
            key = self._keys.get(name)
        try:
            try:
                key = key or self._key_of(name, nbytes)
            except OSError:
                key = self._key_of(name, nbytes)
        except FileNotFoundError:
            return False
        except Exception:  # it may be about anything
            return True
        self._remember(name, key)
        return concerns(key, namespace, chunk_ids)

    def _key_of(self, name: str, nbytes: int) -> KVKey:
        """What the object says of itself. Its seal is not checked: if this is a lie, it is never served."""
        path = self._path(name)
        beginning = memoryview(self._fs.cat_file(path, start=0, end=min(nbytes, _BEGINNING)))
        key = key_in(body(beginning), nbytes - OVERHEAD)
        if key is None:
            key = key_in(body(memoryview(self._fs.cat_file(path))), nbytes - OVERHEAD)
        if key is None or name_of(key) != name:
            raise EntryDamaged("the entry of another key")
        return key


def name_of(key: KVKey) -> str:
    """What the object of ``key`` is named."""
    return f"{hashed(key.namespace)}/{key.digest()}"


def group_of(name: str) -> str:
    """The hash of the namespace that an object belongs to."""
    return name.partition("/")[0]


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
