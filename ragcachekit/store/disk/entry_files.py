"""The files of the disk tier and the index over them, changed together."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock

from ragcachekit.store.base import quota_of
from ragcachekit.store.counters import Counters
from ragcachekit.store.disk.folder import FolderLock, IndexFailed, sweep_orphans, temp_file
from ragcachekit.store.disk.index import SECONDS_TO_LOCK, EntryIndex, IndexDamaged
from ragcachekit.store.entry.file import entry_name, read_key
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.store.entry.image import At, EntryImage

_ENTRY_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")
_NOBODY = ""  # namespace of files that can be neither read nor deleted: they count, under no quota
_MOST_STUCK = 8  # files that one eviction skips because they cannot be deleted
_ACCESSES = 256  # written to the index at once
SECONDS_TO_OPEN = 60.0
"""Longest wait for another process that opens the folder or rebuilds the index."""


class EntryFiles:
    """Entry files in one folder, kept within a budget; several processes may share it.

    Every change of a file is part of a session of the index, which one process has at a time. A file is
    removed before its row, and named after its row was committed: a killed process may leave a row without
    a file, never a file that does not count. Parameters are those of
    :class:`~ragcachekit.store.disk.disk_store.DiskStore`.
    """

    def __init__(
        self, folder: Path, budget: int, quotas: Mapping[str, int], counters: Counters, at: At
    ) -> None:
        self._folder, self._budget, self._quotas = folder, budget, dict(quotas)
        self._prefix = os.path.join(folder, "")
        self._counters, self._at = counters, at
        self._accesses: dict[str, None] = {}
        self._accesses_lock = Lock()
        self._lock = FolderLock(folder / "lock")
        self._index = EntryIndex(folder / "index", self._lock)

    def path(self, digest: str) -> Path:
        """Path of the entry with this digest."""
        return Path(self.name(digest))

    def name(self, digest: str) -> str:
        """As :meth:`path`, as text: joining paths is a tenth of what a read costs before its tensors."""
        return self._prefix + entry_name(digest)

    def content(self) -> tuple[int, int]:
        """Number of entries and their bytes."""
        with suppress(IndexFailed), self._index.session():
            self._write_accesses()
            return len(self._index), self._index.nbytes()
        with suppress(OSError):
            sizes = entry_files(self._folder).values()
            return len(sizes), sum(sizes)
        return 0, 0

    def most(self, namespace: str) -> int:
        """The largest entry of a namespace that can be kept, in bytes."""
        quota = quota_of(self._quotas, namespace)
        return self._budget if quota is None else min(self._budget, quota)

    def put(self, digest: str, namespace: str, image: EntryImage) -> None:
        """Evict for an entry and write it; OSError or IndexFailed leaves an older file unchanged."""
        with self._index.session():
            self._write_accesses()
            held = self._evict(digest, namespace, image.nbytes)
            self._at("room made")
            with temp_file(self._folder) as (path, file):
                self._at("created")
                image.write(file.fd, self._at)
                try:
                    # The larger of both sizes counts until the old file is gone.
                    self._index.add(digest, namespace, max(held, image.nbytes))
                    self._at("indexed")
                    self._index.commit()
                    self._at("committed")
                    file.close()  # Windows renames no open file
                    os.replace(path, self.name(digest))
                    self._at("renamed")
                finally:
                    self._settle(digest)

    def make_space(self, nbytes: int, but: str) -> bool:
        """Evict least recently used entries of ``nbytes`` together, as the volume is full.

        False, with nothing deleted, if all of them but ``but`` are smaller. Where the index cannot be read,
        the least recently written ones go.
        """
        sizes = {digest: size for digest, size in entry_files(self._folder).items() if digest != but}
        if sum(sizes.values()) < nbytes:
            return False
        used: Mapping[str, int] = {}
        with suppress(IndexFailed), self._index.session():
            used = self._index.rows()
        for digest in sorted(sizes, key=list(used).index) if sizes.keys() <= used.keys() else sizes:
            if nbytes > 0 and self.remove(digest):
                self._counters.count("evictions")
                nbytes -= sizes[digest]
        return nbytes <= 0

    def remove(self, digest: str, seen: os.stat_result | None = None) -> bool:
        """Delete an entry, even if the index cannot follow; False if the file is still there.

        ``seen``: only if it is still that file; a writer may have put a whole one in its place.
        """
        try:
            with suppress(IndexFailed), self._index.session():
                if self._unlink(digest, seen):
                    self._at("removed")
                    self._index.remove(digest)
                return True
            self._unlink(digest, seen)
        except OSError as error:
            self._warn_undeleted(error)
            return False
        return True

    def record_access(self, digest: str) -> None:
        """Remember a use; many are written to the index at once, and a crash loses those since."""
        with self._accesses_lock:
            self._accesses.pop(digest, None)
            self._accesses[digest] = None
            if len(self._accesses) < _ACCESSES:
                return
        with suppress(IndexFailed, OSError):
            try:
                with self._index.session(seconds=0.0):
                    self._write_accesses()
            except IndexDamaged:
                self.rebuild(0.0)
        self._take_accesses()  # if they could not be written, an order of use is lost

    def rebuild(self, seconds: float = SECONDS_TO_LOCK, *, anew: bool = False) -> None:
        """Make the index agree with the files; start from nothing if it is damaged or ``anew``."""
        with self._lock.held(seconds):
            sweep_orphans(self._folder)
            if anew:
                self._index.discard()
            try:
                self._reconcile()
            except IndexDamaged as error:
                self._counters.warn_once("index", "index rebuilt from the files: %s", error)
                self._index.discard()
                self._reconcile()

    def wait_for_writers(self, seconds: float) -> None:
        """Wait for puts under way, and remove what dead writers left."""
        with self._lock.held(seconds):
            sweep_orphans(self._folder)

    def close(self) -> None:
        """Write the order of use and close the index."""
        with suppress(IndexFailed, OSError), self._index.session():
            self._write_accesses()
        self._index.close()

    def _reconcile(self) -> None:
        with self._index.session(create=True):
            self._index.check()
            files, rows = entry_files(self._folder), self._index.rows()
            for digest, nbytes in rows.items():
                if files.get(digest) != nbytes:
                    self._index.remove(digest)
            for digest, nbytes in files.items():
                if rows.get(digest) != nbytes:
                    self._settle(digest)
            for namespace in self._index.sum_up():
                quota = quota_of(self._quotas, namespace)
                if quota is not None and namespace != _NOBODY:  # it may be smaller than last time
                    self._shrink(quota, namespace)
            self._shrink(self._budget)

    def _take_accesses(self) -> list[str]:
        with self._accesses_lock:
            taken, self._accesses = list(self._accesses), {}
        return taken

    def _write_accesses(self) -> None:
        used = self._take_accesses()
        if used:
            self._index.touch(used)
            self._at("accesses written")

    def _settle(self, digest: str) -> None:
        """Make the row of an entry agree with its file; a damaged file is deleted."""
        try:
            nbytes = os.lstat(self.name(digest)).st_size
            if self._index.size(digest) != nbytes:
                self._index.add(digest, self._namespace(digest), nbytes)
        except FileNotFoundError:
            self._index.remove(digest)

    def _namespace(self, digest: str) -> str:
        try:
            return read_key(self.path(digest)).namespace
        except FileNotFoundError:
            raise
        except EntryDamaged as error:
            self._counters.warn_once("damaged", "dropped a damaged entry: %s", error)
            self._counters.count("damaged")
            try:
                self._unlink(digest)
            except OSError as failure:
                self._warn_undeleted(failure)
                return _NOBODY
            raise FileNotFoundError from error
        except OSError as error:
            self._counters.warn_once("read", "cannot read from %s: %s", self._folder, error)
            return _NOBODY

    def _evict(self, digest: str, namespace: str, nbytes: int) -> int:
        """Evict until ``nbytes`` under ``digest`` fit; returns the bytes of the file that they replace."""
        held, quota = self._index.size(digest), quota_of(self._quotas, namespace)
        if quota is not None:
            self._shrink(quota - nbytes + held, namespace, but=digest)
        self._shrink(self._budget - nbytes + held, but=digest)
        return held

    def _shrink(self, most: int, namespace: str | None = None, but: str = "") -> None:
        stuck = 0
        while self._index.nbytes(namespace) > most:
            victim = self._index.oldest(but, namespace)
            try:
                self._unlink(victim)
            except OSError as error:
                stuck += 1
                if stuck > _MOST_STUCK:
                    raise
                self._warn_undeleted(error)
                self._index.touch([victim])  # the next one's turn, also the next time
                continue
            self._at("evicted")
            self._index.remove(victim)
            self._counters.count("evictions")

    def _unlink(self, digest: str, seen: os.stat_result | None = None) -> bool:
        """Delete a file; False if another one has replaced ``seen``."""
        path = self.path(digest)
        if seen is not None and not _same(path, seen):
            return False
        path.unlink(missing_ok=True)
        return True

    def _warn_undeleted(self, error: OSError) -> None:
        self._counters.warn_once("remove", "cannot delete from %s: %s", self._folder, error)


def entry_files(folder: Path) -> dict[str, int]:
    """Digest → size of every entry file in a folder, least recently written first."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _ENTRY_NAME.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # another process evicted it just now
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, match[1], status.st_size))
    return {digest: size for _, digest, size in sorted(found)}


def _same(path: Path, seen: os.stat_result) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(status.st_mode) and os.path.samestat(status, seen)
