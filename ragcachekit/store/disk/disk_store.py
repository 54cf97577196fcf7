"""The disk tier: one immutable file per entry, a rebuildable index, least recently used leave first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from ragcachekit.errors import StoreError
from ragcachekit.forks import refuse_after_fork
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, LayerSource, StoreStats
from ragcachekit.store.counters import Counters
from ragcachekit.store.disk.entry_files import SECONDS_TO_OPEN, EntryFiles, entry_files
from ragcachekit.store.disk.folder import FolderBusy, IndexFailed, claim_folder, not_writable
from ragcachekit.store.disk.forgets import DiskForgets
from ragcachekit.store.disk.index import SECONDS_TO_LOCK, IndexDamaged
from ragcachekit.store.disk.source import DiskSource
from ragcachekit.store.disk.volume import is_full, takes_no_writes
from ragcachekit.store.entry.buffers import Buffers
from ragcachekit.store.entry.file import EntryReader, open_entry, read_key
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.store.entry.image import At, EntryImage, nowhere
from ragcachekit.types import KVKey

_IDLE_BYTES = 128 << 20  # of memory kept for the next reads
STEPS = (
    *("evicted", "room made", "created", "half written", "written"),
    *("indexed", "committed", "renamed", "removed", "read", "uses noted"),
)
"""What ``at`` is called with."""


class DiskStore:
    """Chunk KV in files that survive the process; several processes may share the folder.

    The files are the truth: a read opens the file and verifies all of it, whatever the index says. The
    index only has sizes and the order of use. A write goes to a temporary file, is added to the index, and
    then gets its name, so that being killed at any moment leaves nothing but whole entries, a row of the
    index that says too much, and a temporary file; the next start sets both right.

    Parameters
    ----------
    path : Path
        The folder, created with mode 0700 (POSIX only).
    budget : int
        Bytes that all entry files may take together; > 0. The index (some hundred bytes per entry) and
        the one entry being written come on top.
    quotas : mapping of str to int
        Bytes that single namespaces may take (``*``: every other one). Whoever is over it loses entries
        of its own, least recently used first.
    at : callable
        Called with the name of each of the :data:`STEPS` at which a crash could leave something behind:
        the place to interrupt the store in a test.

    Attributes
    ----------
    folder : Path

    Notes
    -----
    A power failure costs misses: what was written last may be torn, which its checksums show. What was
    forgotten does not come back.

    On a medium that is full, read-only or failing the folder is opened all the same: what is there is read,
    a put is False until the medium takes writes again, and ``stats`` says so. A volume that fills up later
    loses the least recently used entries.

    Raises
    ------
    StoreError
        If the folder is not a folder, or is not ours alone; the message says what to do.
    """

    shared = True
    remote = False

    def __init__(
        self,
        path: Path,
        budget: int,
        *,
        quotas: Mapping[str, int] | None = None,
        at: At = nowhere,
    ) -> None:
        if budget <= 0:
            raise ValueError(
                f"the disk tier's budget must be > 0 bytes, got {budget}; leave the tier out instead"
            )
        self.folder = self._folder = Path(path)
        self._budget = budget
        self._at = at
        self._counters = Counters("disk")
        self._closed = False
        self._buffers = Buffers(_IDLE_BYTES)
        self._files = EntryFiles(self._folder, budget, quotas or {}, self._counters, at)
        self._forgets = DiskForgets(self._files, self._counters)
        self._ours = self._writable = self._no_use = False
        try:
            self._open(SECONDS_TO_OPEN)
        except (OSError, StoreError) as error:
            if not takes_no_writes(error):
                raise _not_opened(self._folder, error) from error
            self._counters.warn_once("open", "cannot be written to for now, only read: %s", error)
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
                self._ended(digest, reader.status, error)
                return None
        self._ended(digest, reader.status, None)
        return Found(kv, "disk")

    def open(self, key: KVKey, weight: float = 1.0) -> LayerSource | None:
        """The entry under ``key`` with its header verified, layers to be read one by one; or None.

        Several threads may read several entries, or the same one, at once.
        """
        digest = key.digest()
        reader = self._reader(key, digest)
        if reader is None:
            return None
        return DiskSource(reader, partial(self._ended, digest, reader.status))

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Write ``kv`` to its file, evicting least recently used entries first.

        False, with all other entries whole, if it exceeds the whole budget or its namespace's quota, or
        the medium refuses it. An entry that is already there under this key is replaced at once and as a
        whole. True means that it survives a crash of the process.

        Raises
        ------
        TypeError
            For KV of a dtype that safetensors does not know.
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
        """As :meth:`put`; nobody is handed down."""
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        digest = key.digest()
        return not (self._closed or not self._ours or self._forgets.hides(key, digest)) and os.path.exists(
            self._files.name(digest)
        )

    def discard(self, key: KVKey) -> None:
        """Delete the entry under ``key``, which nobody could use, and count it as damaged.

        One that cannot be deleted is not handed out by this process any more.
        """
        if key in self:
            self._counters.count("damaged")
            if not self._files.remove(key.digest()):
                self._forgets.hide(key, key.digest())

    def keys(self) -> Iterator[KVKey]:
        """Keys by the headers of the files, those written last first; what cannot be read is left out."""
        with suppress(OSError):
            for digest in reversed(entry_files(self._folder)):
                with suppress(OSError, EntryDamaged):
                    yield read_key(self._files.path(digest))

    def evict(self, key: KVKey) -> None:
        """Delete the entry under ``key`` and count an eviction."""
        if key in self and self._files.remove(key.digest()):
            self._counters.count("evictions")

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys."""
        return frozenset() if self._closed else self._forgets.drop(namespace, chunk_ids)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Delete the files of the namespace that hold, or were encoded behind, one of ``chunk_ids``.

        Files too damaged to say whose they are go as well, and so do those of the namespace whose header
        cannot be read. What cannot be deleted is not handed out by this process any more, and not counted.

        Raises
        ------
        StoreError
            If the folder cannot be listed, or another process writes to it and does not end. Something may be
            left; what is known has gone.
        """
        return len(self.drop(namespace, chunk_ids))

    def stats(self) -> tuple[StoreStats, ...]:
        """One record."""
        entries, nbytes = (0, 0) if self._closed else self._content()
        sizes = {"entries": entries, "nbytes": nbytes, "budget": self._budget}
        return (self._counters.stats(**sizes, writable=self._writable),)

    def close(self) -> None:
        """Close the index; further calls are misses."""
        self._closed = True
        self._forgets.retry()
        self._files.close()
        self._buffers.clear()

    def _open(self, seconds: float) -> None:
        """Have the folder ready for reading, then for writing; raises what keeps it from either."""
        if not self._ours:
            claim_folder(self._folder)
            self._ours = True
        self._files.open(seconds)
        self._writable = True

    def _content(self) -> tuple[int, int]:
        try:
            return self._files.content()
        except OSError as error:
            self._counters.warn_once("read", "cannot read from %s: %s", self._folder, error)
            return 0, 0

    def _reader(self, key: KVKey, digest: str) -> EntryReader | None:
        """The open file of ``key``, or None and a counted miss."""
        if not (self._closed or not self._ours or self._forgets.hides(key, digest)):
            try:
                return open_entry(self._files.name(digest), key, self._buffers)
            except FileNotFoundError:
                pass
            except EntryDamaged as error:
                self._failed(digest, error.seen, error)
            except OSError as error:
                self._failed(digest, None, error)
        self._counters.count("misses")
        return None

    def _ended(self, digest: str, seen: os.stat_result, error: EntryDamaged | OSError | None) -> None:
        """Count how reading an entry ended."""
        if error is None:
            self._at("read")
            self._counters.count("hits")
            self._files.note(digest)
        else:
            self._counters.count("misses")
            self._failed(digest, seen, error)

    def _failed(self, digest: str, seen: os.stat_result | None, error: EntryDamaged | OSError) -> None:
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
            if not is_full(error) or self._no_use or not self._files.make_space(image.nbytes, key.digest()):
                raise
            self._no_use = True  # until a put succeeds: no entry leaves for nothing twice
            kept = self._write(key, image)
        self._no_use = False
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
        self._forgets.retry()
        if self._forgets.hides(key, digest):
            return False
        try:
            self._files.put(digest, key.namespace, image)
        except IndexDamaged:
            self._files.rebuild()
            self._files.put(digest, key.namespace, image)
        return True


def _not_opened(folder: Path, error: OSError | StoreError) -> StoreError:
    if isinstance(error, FolderBusy):
        return StoreError(f"cannot open the cache folder {folder}: {error}")
    if isinstance(error, StoreError) and not isinstance(error, IndexFailed):
        return error  # it says what to do
    return not_writable(folder, error)
