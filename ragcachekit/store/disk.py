"""The disk tier: one immutable file per entry, eviction by least recent use."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from ragcachekit.config import DEFAULT_DISK_BYTES
from ragcachekit.errors import StoreError
from ragcachekit.files import sync_folder
from ragcachekit.forks import refuse_after_fork
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Counters, Evicted, Found, LayerSource, StoreStats, Tier, concerns
from ragcachekit.store.disk_files import (
    SECONDS_TO_LOCK,
    SECONDS_TO_OPEN,
    EntryFiles,
    FolderBusy,
    LockFailed,
    claim_folder,
    entry_files,
    not_writable,
)
from ragcachekit.store.entry import (
    At,
    Buffers,
    EntryDamaged,
    EntryImage,
    EntryReader,
    nowhere,
    open_entry,
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


class DiskSource:
    """A :class:`~ragcachekit.store.base.LayerSource` over one entry file; closes ``reader``.

    ``ended`` is called once: with None when all was read, or with the error that ended the reading. A source
    that is closed early does not call it, and is neither a hit nor a miss.
    """

    tier: str = "disk"

    def __init__(self, reader: EntryReader, ended: Callable[[EntryDamaged | OSError | None], None]) -> None:
        self._reader, self._ended, self._over = reader, ended, False
        header = reader.header
        layout = header.layout
        self.nbytes, self.layers, self.shapes = layout.nbytes, layout.layers, layout.shapes
        self.tokens = layout.groups[0][1].shape[1]
        self.start, self.quantised = header.start, header.quantised
        self.sums: Mapping[str, torch.Tensor] = reader.sums

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._reader.layer(number)
        except (EntryDamaged, OSError) as error:
            self._end(error)
            raise

    def finished(self, kv: ChunkKV) -> None:
        self._end(None)

    def close(self) -> None:
        self._reader.close()

    def _end(self, error: EntryDamaged | OSError | None) -> None:
        if not self._over:
            self._over = True
            self._ended(error)


_IDLE_BYTES = 128 << 20  # of memory kept for the next reads
STEPS = ("evicted", "room made", "created", "half written", "written", "renamed", "removed", "read")
"""Arguments that ``at`` is called with."""


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
        recently used entries. Opening a folder with quotas reads the header of every entry.
    at : callable
        Called with each of the :data:`STEPS`, for tests that interrupt the store.

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

    def __init__(
        self, path: Path, budget: int, *, quotas: Mapping[str, int] | None = None, at: At = nowhere
    ) -> None:
        if budget <= 0:
            raise ValueError(
                f"the disk tier's budget must be > 0 bytes, got {budget}; leave the tier out instead"
            )
        self.folder = self._folder = Path(path)
        self._budget = budget
        self._at = at
        self._counters = Counters("disk")
        self._buffers = Buffers(_IDLE_BYTES)
        self._files = EntryFiles(self._folder, budget, quotas or {}, self._counters, at)
        self._is_readable = self._writable = False
        self._still_full = False
        self._undeleted: set[str] = set()  # forgotten digests whose files could not be deleted
        try:
            self._open(SECONDS_TO_OPEN)
        except (OSError, StoreError) as error:
            if not takes_no_writes(error):
                raise _not_opened(self._folder, error) from error
            self._counters.warn_once("open", "cannot be written to for now, only read: %s", error)
        self._closed = False
        refuse_after_fork(self)

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The verified entry under ``key``, now the most recently used one, or None."""
        digest = key.digest()
        reader = self._reader(key, digest)
        if reader is None:
            return None
        with reader:
            try:
                kv = reader.kv()
            except (EntryDamaged, OSError) as error:
                self._ended(digest, error, reader.status)
                return None
        self._ended(digest)
        return Found(kv, "disk")

    def open(self, key: KVKey, weight: float = 1.0) -> LayerSource | None:
        """The entry under ``key`` with its header verified, layers to be read one by one; or None."""
        digest = key.digest()
        reader = self._reader(key, digest)
        if reader is None:
            return None
        return DiskSource(reader, partial(self._ended, digest, seen=reader.status))

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Write ``kv`` to its file, evicting least recently used entries first; replaces an entry atomically.

        False if it exceeds the budget or its namespace's quota, or the medium refuses it. True means that the
        entry survives a crash of the process. TypeError for a dtype that safetensors does not have.
        """
        if self._closed:
            return False
        image = EntryImage(key, kv)
        try:
            kept = self._write_with_space(key, image)
        except (OSError, StoreError) as error:
            self._counters.warn_once("write", "cannot write to %s: %s", self._folder, error)
            kept = False
        if not kept:
            self._counters.count("failed_writes")
        return kept

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        digest = key.digest()
        return self._is_served(digest) and os.path.exists(self._files.name(digest))

    def discard(self, key: KVKey) -> None:
        """Delete the unusable entry under ``key``, and count it as damaged."""
        if key in self:
            self._counters.count("damaged")
            self._files.remove(key.digest())

    def keys(self) -> Iterator[KVKey]:
        """Keys by the headers of the files, the latest first; unreadable files are skipped."""
        with suppress(OSError):
            for digest in reversed(entry_files(self._folder)):
                with suppress(OSError, EntryDamaged):
                    yield read_key(self._files.path(digest))

    def evict(self, key: KVKey) -> None:
        """Delete the entry under ``key`` and count an eviction."""
        if key in self and self._files.remove(key.digest()):
            self._counters.count("evictions")

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """Delete the namespace's files that hold, or were encoded behind, one of ``chunk_ids``.

        Files with a damaged header are deleted as well, whosever they are.

        Raises
        ------
        StoreError
            If the folder cannot be listed, a file not be read or deleted (Windows deletes no open file), or
            another process keeps writing. All other files have been deleted, and this store returns nothing
            from those that could not be; forget again.
        """
        if self._closed or not self._folder.is_dir():
            return frozenset()
        busy: FolderBusy | None = None
        try:
            self._files.wait_for_writers(SECONDS_TO_OPEN)
        except FolderBusy as error:
            busy = error
        except LockFailed as error:  # nobody can lock the folder, and so write to it
            self._counters.warn_once("lock", "cannot wait for other writers: %s", error)
        dropped, failures = set(), list[OSError]()
        try:
            for digest in entry_files(self._folder):
                try:
                    if self._drops(digest, namespace, chunk_ids):
                        dropped.add(digest)
                except OSError as error:
                    failures.append(error)
        except OSError as error:
            raise StoreError(f"cannot list the cache folder; forget again: {error}") from error
        if dropped:
            sync_folder(self._folder)
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
        self._buffers.clear()

    def _open(self, seconds: float) -> None:
        """Prepare the folder for reading, then for writing."""
        claim_folder(self._folder)
        self._is_readable = True
        self._files.prepare(seconds)
        self._writable = True

    def _is_served(self, digest: str) -> bool:
        return self._is_readable and digest not in self._undeleted

    def _reader(self, key: KVKey, digest: str) -> EntryReader | None:
        """The open file of ``key``, or None and a counted miss."""
        if self._is_served(digest):
            try:
                return open_entry(self._files.name(digest), key, self._buffers)
            except FileNotFoundError:
                pass
            except (EntryDamaged, OSError) as error:
                self._ended(digest, error, error.seen if isinstance(error, EntryDamaged) else None)
                return None
        self._counters.count("misses")
        return None

    def _ended(
        self, digest: str, error: EntryDamaged | OSError | None = None, seen: os.stat_result | None = None
    ) -> None:
        """Count how reading an entry ended, and delete a damaged one if it still is the file ``seen``."""
        if error is None:
            self._at("read")
            self._counters.count("hits")
            self._files.record_use(digest)
            return
        self._counters.count("misses")
        if isinstance(error, EntryDamaged):
            self._counters.warn_once("damaged", "dropped a damaged entry: %s", error)
            self._counters.count("damaged")
            self._files.remove(digest, seen)
        else:
            self._counters.warn_once("read", "cannot read from %s: %s", self._folder, error)

    def _write_with_space(self, key: KVKey, image: EntryImage) -> bool:
        """Write the entry; on a full volume, once more in place of others."""
        try:
            kept = self._write(key, image)
        except (OSError, StoreError) as error:
            if not is_full(error) or self._still_full:
                raise
            if not self._files.make_space(image.nbytes, key.digest()):
                raise
            self._still_full = True  # until a put succeeds: no entry is evicted in vain twice
            kept = self._write(key, image)
        self._still_full = False
        return kept

    def _write(self, key: KVKey, image: EntryImage) -> bool:
        if not self._writable:
            self._open(SECONDS_TO_LOCK)
        digest, most = key.digest(), self._files.most(key.namespace)
        if image.nbytes > most:
            self._counters.warn_once(
                "large", "entry of %d bytes exceeds the budget or quota %d", image.nbytes, most
            )
            return False
        self._files.put(digest, key.namespace, image)
        self._undeleted.discard(digest)
        return True

    def _drops(self, digest: str, namespace: str, chunk_ids: frozenset[str] | None) -> bool:
        """Delete an entry if it is to be forgotten or damaged; OSError if it cannot be read or deleted."""
        try:
            if not concerns(read_key(self._files.path(digest)), namespace, chunk_ids):
                return False
        except EntryDamaged:
            self._counters.count("damaged")
        except FileNotFoundError:  # another process evicted it just now
            return False
        if not self._files.remove(digest):
            self._undeleted.add(digest)
            raise OSError(f"cannot delete {self._files.name(digest)}")
        self._undeleted.discard(digest)
        return True


def _not_opened(folder: Path, error: OSError | StoreError) -> StoreError:
    if isinstance(error, FolderBusy):
        return StoreError(f"cannot open the cache folder {folder}: {error}")
    if isinstance(error, StoreError) and not isinstance(error, LockFailed):
        return error
    return not_writable(folder, error)
