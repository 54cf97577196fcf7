"""The disk tier: one immutable file per entry, eviction by least recent use."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from ragcachekit.config import DEFAULT_DISK_BYTES
from ragcachekit.errors import StoreError
from ragcachekit.files import sync_folder
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Counters, Evicted, Found, LayerSource, StoreStats, Tier, concerns
from ragcachekit.store.disk_files import (
    NO_GROUP,
    SECONDS_TO_LOCK,
    SECONDS_TO_OPEN,
    EntryFiles,
    FolderBusy,
    LockFailed,
    claim_folder,
    digest_of,
    entry_files,
    group_of,
    not_writable,
)
from ragcachekit.store.entry import (
    EntryDamaged,
    EntryFile,
    encode_entry,
    entry_name,
    hashed,
    open_file,
    read_key,
)
from ragcachekit.types import KVKey

_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_NO_WRITES = {*_NO_SPACE, errno.EROFS, errno.EIO}
_SHARE_OF_FREE, _SHARE_OF_VOLUME = 2, 16


def takes_no_writes(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means that the medium is full, read-only or failing."""
    return _has_code(error, _NO_WRITES)


def is_full(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means that there is no space left."""
    return _has_code(error, _NO_SPACE)


def _has_code(error: BaseException | None, codes: set[int]) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in codes:
            return True
        error = error.__cause__
    return False


def default_disk_bytes(folder: Path) -> int:
    """The default budget of a disk tier.

    64 GiB, or half of what is free or already the folder's where that is less; but at least a sixteenth of
    the volume, and at least the folder's present content.
    """
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    taken = 0
    try:
        volume = shutil.disk_usage(existing)
        for file in folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # another process evicted it just now
                taken += file.stat().st_size
    except OSError:
        return DEFAULT_DISK_BYTES
    free, least = volume.free + taken, volume.total // _SHARE_OF_VOLUME
    return max(1, min(DEFAULT_DISK_BYTES, max(free // _SHARE_OF_FREE, least, taken)))


Ended = Callable[[EntryDamaged | OSError | None], None]
"""Called once with how reading an entry ended: None when all was read."""


class DiskSource:
    """A :class:`~ragcachekit.store.base.LayerSource` over one entry file; closes ``file``.

    ``ended`` is called once: with None when all was read, or with the error that ended the reading. A source
    that is closed early does not call it, and is neither a hit nor a miss.
    """

    tier: str = "disk"

    def __init__(self, file: EntryFile, ended: Callable[[EntryDamaged | OSError | None], None]) -> None:
        self._file, self._ended, self._over = file, ended, False
        header = file.header
        self.nbytes, self.layers, self.tokens = header.offsets[-1], len(header.layers), header.tokens
        self.shapes, self.start, self.quantised = header.layers, header.start, header.quantised
        self.sums: Mapping[str, torch.Tensor] = file.sums

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._file.layer(number)
        except (EntryDamaged, OSError) as error:
            self._end(error)
            raise

    def finished(self, kv: ChunkKV) -> None:
        self._end(None)

    def close(self) -> None:
        self._file.close()

    def _end(self, error: EntryDamaged | OSError | None) -> None:
        if not self._over:
            self._over = True
            self._ended(error)


class DiskStore(Tier):
    """Chunk KV in files that survive the process; several processes may share the folder.

    A read opens the file, verifies all of it, and sets its modification time: the order of use. A write goes
    to a temporary file, which is renamed. A killed process leaves whole entries, and a temporary file that
    the next start removes.

    Parameters
    ----------
    path : Path
        The folder, created with mode 0700 (POSIX only); then the attribute ``folder``.
    budget : int
        Bytes of all entry files together; > 0. The entry being written comes on top.
    quotas : mapping of str to int
        Bytes of single namespaces (``*``: every other one). A namespace above its quota loses its own least
        recently used entries.

    Notes
    -----
    A power failure may tear what was written last, which checksums detect: a miss. What was forgotten does
    not come back. On a medium that is full, read-only or failing the folder is opened for reading, and a put
    returns False until the medium takes writes again.

    Raises
    ------
    StoreError
        If the folder is not a folder, or is not ours alone.
    """

    shared = True

    def __init__(self, path: Path, budget: int, *, quotas: Mapping[str, int] | None = None) -> None:
        if budget <= 0:
            raise ValueError(
                f"the disk tier's budget must be > 0 bytes, got {budget}; leave the tier out instead"
            )
        self.folder = Path(path)
        self._budget = budget
        self._counters = Counters("disk")
        self._files = EntryFiles(self.folder, budget, quotas or {}, self._counters)
        self._is_readable = self._writable = self._closed = False
        self._still_full = False
        self._undeleted: set[str] = set()  # names of forgotten entries whose files could not be deleted
        try:
            self._open(SECONDS_TO_OPEN)
        except (OSError, StoreError) as error:
            if not takes_no_writes(error):
                raise _not_opened(self.folder, error) from error
            self._counters.warn_once("open", "cannot be written to for now, only read: %s", error)

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The verified entry under ``key``, now the most recently used one, or None."""
        opened = self._opened(key)
        if opened is None:
            return None
        file, ended = opened
        with file:
            try:
                kv = file.kv()
            except (EntryDamaged, OSError) as error:
                ended(error)
                return None
        ended(None)
        return Found(kv, "disk")

    def open(self, key: KVKey, weight: float = 1.0) -> LayerSource | None:
        """The entry under ``key`` with its header verified, layers to be read one by one; or None."""
        opened = self._opened(key)
        return None if opened is None else DiskSource(*opened)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Write ``kv`` to its file, evicting least recently used entries first; replaces an entry atomically.

        False if it exceeds the budget or its namespace's quota, or the medium refuses it. True means that the
        entry survives a crash of the process. TypeError for a dtype that safetensors does not have.
        """
        if self._closed:
            return False
        name, parts = entry_name(key), encode_entry(key, kv)
        try:
            kept = self._write_with_space(name, parts)
        except (OSError, StoreError) as error:
            self._counters.warn_once("write", "cannot write to %s: %s", self.folder, error)
            kept = False
        if not kept:
            self._counters.count("failed_writes")
        return kept

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        name = entry_name(key)
        return self._is_served(name) and os.path.exists(self._files.path(name))

    def discard(self, key: KVKey) -> None:
        """Delete the unusable entry under ``key``, and count it as damaged."""
        if key in self:
            self._counters.count("damaged")
            self._files.remove(entry_name(key))

    def keys(self) -> Iterator[KVKey]:
        """Keys by the headers of the files, the latest first; unreadable files are skipped."""
        with suppress(OSError):
            for name in reversed(entry_files(self.folder)):
                with suppress(OSError, EntryDamaged):
                    yield read_key(self.folder / name)

    def evict(self, key: KVKey) -> None:
        """Delete the entry under ``key`` and count an eviction."""
        if key in self and self._files.remove(entry_name(key)):
            self._counters.count("evictions")

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """Delete the namespace's files that hold, or were encoded after, one of ``chunk_ids``.

        Its files with a damaged header are deleted as well, and those of former versions of this library.

        Raises
        ------
        StoreError
            If the folder cannot be listed, a file not be read or deleted (Windows deletes no open file), or
            another process keeps writing. All other files have been deleted, and this store returns nothing
            from those that could not be; forget again.
        """
        if self._closed or not self.folder.is_dir():
            return frozenset()
        busy: FolderBusy | None = None
        try:
            self._files.wait_for_writers(SECONDS_TO_OPEN)
        except FolderBusy as error:
            busy = error
        except LockFailed as error:  # nobody can lock the folder, and so write to it
            self._counters.warn_once("lock", "cannot wait for other writers: %s", error)
        dropped, failures, group = set(), list[OSError](), hashed(namespace)
        try:
            for name in [name for name in entry_files(self.folder) if group_of(name) in (group, NO_GROUP)]:
                try:
                    if self._drops(name, namespace, chunk_ids):
                        dropped.add(digest_of(name))
                except OSError as error:
                    failures.append(error)
        except OSError as error:
            raise StoreError(f"cannot list the cache folder; forget again: {error}") from error
        if dropped:
            sync_folder(self.folder)
        if failures:
            raise StoreError(
                f"{len(failures)} entries could not be read or deleted; forget again: {failures[0]}"
            ) from failures[0]
        if busy is not None:
            raise StoreError(
                "another process or thread keeps the cache folder busy and may write what was forgotten; "
                f"forget again when it goes on or has ended: {busy}"
            ) from busy
        return frozenset(dropped)

    def stats(self) -> tuple[StoreStats, ...]:
        entries, nbytes = (0, 0) if self._closed else self._files.content()
        sizes = {"entries": entries, "nbytes": nbytes, "budget": self._budget}
        return (self._counters.stats(**sizes, writable=self._writable),)

    def close(self) -> None:
        self._closed, self._is_readable = True, False

    def _open(self, seconds: float) -> None:
        """Prepare the folder for reading, then for writing."""
        claim_folder(self.folder)
        self._is_readable = True
        self._files.prepare(seconds)
        self._writable = True

    def _is_served(self, name: str) -> bool:
        return self._is_readable and name not in self._undeleted

    def _opened(self, key: KVKey) -> tuple[EntryFile, Ended] | None:
        """The open file of ``key`` and what is to be called with the outcome, or None and a counted miss."""
        name, file, seen = entry_name(key), None, None
        if self._is_served(name):
            try:
                file = open_file(self._files.path(name))
                seen = os.fstat(file.fd)
                return EntryFile(file, key), partial(self._ended, name, seen)
            except FileNotFoundError:
                pass
            except BaseException as error:
                if file is not None:
                    file.close()
                if not isinstance(error, EntryDamaged | OSError):
                    raise
                self._ended(name, seen, error)
                return None
        self._counters.count("misses")
        return None

    def _ended(self, name: str, seen: os.stat_result | None, error: EntryDamaged | OSError | None) -> None:
        """Count how reading an entry ended, and delete a damaged one if it still is the file ``seen``."""
        if error is None:
            self._counters.count("hits")
            self._files.record_use(name)
            return
        self._counters.count("misses")
        if isinstance(error, EntryDamaged):
            self._counters.warn_once("damaged", "dropped a damaged entry: %s", error)
            self._counters.count("damaged")
            self._files.remove(name, seen)
        else:
            self._counters.warn_once("read", "cannot read from %s: %s", self.folder, error)

    def _write_with_space(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Write the entry; on a full volume, once more in place of others."""
        try:
            kept = self._write(name, parts)
        except (OSError, StoreError) as error:
            if not is_full(error) or self._still_full:
                raise
            if not self._files.make_space(sum(map(len, parts)), name):
                raise
            self._still_full = True  # until a put succeeds: no entry is evicted in vain twice
            kept = self._write(name, parts)
        self._still_full = False
        return kept

    def _write(self, name: str, parts: Sequence[memoryview]) -> bool:
        if not self._writable:
            self._open(SECONDS_TO_LOCK)
        limit, nbytes = self._files.limit(name), sum(map(len, parts))
        if nbytes > limit:
            self._counters.warn_once(
                "large", "entry of %d bytes exceeds the budget or quota %d", nbytes, limit
            )
            return False
        self._files.put(name, parts)
        self._undeleted.discard(name)
        return True

    def _drops(self, name: str, namespace: str, chunk_ids: frozenset[str] | None) -> bool:
        """Delete an entry if it is to be forgotten or damaged; OSError if it cannot be read or deleted."""
        try:
            if chunk_ids is not None and not concerns(read_key(self.folder / name), namespace, chunk_ids):
                return False
        except EntryDamaged:
            self._counters.count("damaged")
        except FileNotFoundError:  # another process evicted it just now
            return False
        if not self._files.remove(name):
            self._undeleted.add(name)
            raise OSError(f"cannot delete {self._files.path(name)}")
        self._undeleted.discard(name)
        return True


def _not_opened(folder: Path, error: OSError | StoreError) -> StoreError:
    if isinstance(error, FolderBusy):
        return StoreError(f"cannot open the cache folder {folder}: {error}")
    if isinstance(error, StoreError) and not isinstance(error, LockFailed):
        return error
    return not_writable(folder, error)
