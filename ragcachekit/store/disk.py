"""The disk tier: one immutable file per entry, eviction by least recent use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ragcachekit.config import DEFAULT_DISK_BYTES
from ragcachekit.errors import StoreError
from ragcachekit.files import sync_folder
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import KVStore, LayerSource, Pair, StoreStats, concerns
from ragcachekit.store.disk_folder import (
    SECONDS_TO_LOCK,
    SECONDS_TO_OPEN,
    EntryFolder,
    LockFailed,
    claim_folder,
    digest_of,
    entry_files,
    group_of,
)
from ragcachekit.store.entry import (
    EntryDamaged,
    EntryReader,
    encode_entry,
    entry_name,
    hashed,
    open_file,
    read_key,
)
from ragcachekit.store.eviction import Counters
from ragcachekit.types import KVKey


def default_disk_bytes(folder: Path) -> int:
    """The default budget of a disk tier.

    64 GiB, or half of what is free or already the folder's where that is less; at least its present content.
    """
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        free = shutil.disk_usage(existing).free
        taken = sum(entry_files(folder).values()) if folder.is_dir() else 0
    except OSError:
        return DEFAULT_DISK_BYTES
    return max(1, taken, min(DEFAULT_DISK_BYTES, (free + taken) // 2))


class DiskStore(KVStore):
    """Chunk KV in files that survive the process; several processes may share the folder ``path``.

    A read opens the file, verifies all of it, and sets its modification time: the order of use. A write goes
    to a temporary file, which is renamed. A killed process leaves whole entries, and a temporary file that
    the next start removes. ``budget`` limits the bytes of all entry files, on top of which comes the entry
    being written; ``quotas`` those of single namespaces (``*``: every other one).

    A power failure may tear what was written last, which checksums detect: a miss. What was forgotten does
    not come back. A folder that cannot be written to is opened for reading, and a put returns False until it
    can be; so it does on a full volume. StoreError if the folder is not ours alone, or cannot be made.
    """

    shared = True

    def __init__(self, path: Path, budget: int, *, quotas: Mapping[str, int] | None = None) -> None:
        self.folder = Path(path)
        self._budget = budget
        self._counters = Counters("disk")
        self._files = EntryFolder(self.folder, budget, quotas or {}, self._counters)
        self._prepared = self._writable = self._closed = False
        self._undeleted: set[str] = set()  # names of forgotten entries whose files could not be deleted
        claim_folder(self.folder)
        try:
            self._prepare(SECONDS_TO_OPEN)
        except (OSError, LockFailed) as error:
            if isinstance(error, LockFailed) and error.busy:
                raise
            self._counters.warn_once("open", "cannot be written to for now, only read: %s", error)

    def open(self, key: KVKey, weight: float = 1.0) -> LayerSource | None:
        """The entry under ``key`` with its header verified, layers to be read one by one; or None.

        One that is closed early is neither a hit nor a miss.
        """
        name, file, seen = entry_name(key), None, None
        try:
            if not self._is_served(name):
                raise FileNotFoundError(name)
            file = open_file(self._files.path(name))
            seen = os.fstat(file.fd)
            entry = EntryReader.of_file(file, key)
        except FileNotFoundError:
            self._counters.count("misses")
            return None
        except BaseException as error:
            if file is not None:
                file.close()
            if not isinstance(error, EntryDamaged | OSError):
                raise
            self._ended(name, seen, error)
            return None
        over: list[bool] = []

        def end(error: EntryDamaged | OSError | None) -> None:
            if not over:
                over.append(True)
                self._ended(name, seen, error)

        def layer(number: int) -> Pair:
            try:
                return entry.layer(number)
            except (EntryDamaged, OSError) as error:
                end(error)
                raise

        header = entry.header
        calls = layer, lambda _: end(None), file.close
        about = header.start, entry.sums, header.quantised
        return LayerSource("disk", entry.nbytes, header.layers, *calls, *about)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Write ``kv`` to its file, evicting least recently used entries first; replaces an entry atomically.

        False if it exceeds the budget or its namespace's quota, or the medium refuses it. True means that the
        entry survives a crash of the process. TypeError for a dtype that safetensors does not have.
        """
        if self._closed:
            return False
        name, parts = entry_name(key), encode_entry(key, kv)
        try:
            kept = self._write(name, parts)
        except (OSError, StoreError) as error:
            self._counters.warn_once("write", "cannot write to %s: %s", self.folder, error)
            kept = False
            if not (isinstance(error, LockFailed) and error.busy):
                self._writable = False
        if not kept:
            self._counters.count("failed_writes")
        return kept

    def __contains__(self, key: KVKey) -> bool:
        name = entry_name(key)
        return self._is_served(name) and os.path.exists(self._files.path(name))

    def discard(self, key: KVKey, *, damaged: bool = True) -> None:
        if key in self and self._files.remove(entry_name(key)):
            self._counters.count("damaged" if damaged else "evictions")

    def keys(self, *, in_memory: bool = False) -> Iterator[KVKey]:
        """Keys of all entries, the most recently used first; every header is read."""
        if self._closed or in_memory:
            return
        for name in filter(self._is_served, reversed(entry_files(self.folder))):
            with suppress(OSError, EntryDamaged):
                yield read_key(self.folder / name)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """Delete entries; StoreError if some may be left. This store hides those it could not delete.

        Waits for puts under way in other processes, and goes on after a while.
        """
        if self._closed or (chunk_ids is not None and not chunk_ids):
            return frozenset()
        busy = None
        try:
            self._files.wait_for_writers(SECONDS_TO_OPEN)
        except LockFailed as error:
            if error.busy:
                busy = error
            else:  # nobody can lock the folder, and so write to it
                self._counters.warn_once("lock", "cannot wait for other writers: %s", error)
        dropped, failures = set(), list[OSError]()
        try:
            for name in [name for name in entry_files(self.folder) if group_of(name) == hashed(namespace)]:
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
        self._closed = True

    def _prepare(self, seconds: float) -> None:
        self._files.prepare(seconds)
        self._prepared = self._writable = True

    def _is_served(self, name: str) -> bool:
        return not self._closed and name not in self._undeleted

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

    def _write(self, name: str, parts: Sequence[memoryview]) -> bool:
        if not self._prepared:
            self._prepare(SECONDS_TO_LOCK)
        limit, nbytes = self._files.limit(name), sum(map(len, parts))
        if nbytes > limit:
            self._counters.warn_once(
                "large", "entry of %d bytes exceeds the budget or quota %d", nbytes, limit
            )
            return False
        self._files.put(name, parts)
        self._writable = True
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
