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
from ragcachekit.store.entry_file import At, read_key
from ragcachekit.store.entry_header import EntryDamaged
from ragcachekit.store.folder import TempFile, exclusive, sweep_orphans, sync_folder
from ragcachekit.store.index import EntryIndex, IndexFailed

_ENTRY_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")
_NOTES = 256  # uses remembered before they are written down


class Shelf:
    """Entry files in one folder, kept within a budget; several processes may share it.

    The files are the truth. Every change of a file stands inside a session of the index. A file goes before
    its row, and comes after its row was committed: whoever is killed in between leaves a row that says too
    much, never a file that nobody counts.

    Parameters
    ----------
    folder : Path
        Exists and is ours.
    budget : int
        Bytes of all entry files together.
    quotas : mapping of str to int
        Bytes of single namespaces (``*``: every other one).
    counters : Counters
        Hears of evictions and of damaged files.
    at : callable
        Hears of every step worth being killed at.

    Raises
    ------
    OSError, IndexFailed
        If the folder or the index cannot be used.
    """

    def __init__(
        self, folder: Path, budget: int, quotas: Mapping[str, int], counters: Counters, at: At
    ) -> None:
        self._folder, self._budget, self._quotas = folder, budget, dict(quotas)
        self._prefix = os.path.join(folder, "")
        self._counters, self._at = counters, at
        self._noting = Lock()
        self._used: dict[str, None] = {}
        self._missed: set[str] = set()
        self._nbytes = 0  # of all entries, when this process last looked
        self._index = EntryIndex(folder / "index")
        with exclusive(folder / "lock"):
            sweep_orphans(folder)
            self._restore()

    def path(self, digest: str) -> Path:
        """Where the entry with this digest stands, if there is one."""
        return Path(self.name(digest))

    def name(self, digest: str) -> str:
        """As :meth:`path`, as text: joining paths is a tenth of what a read costs before its tensors."""
        return f"{self._prefix}{digest}.safetensors"

    def files(self) -> dict[str, int]:
        """As :func:`entry_files`."""
        return entry_files(self._folder)

    def content(self) -> tuple[int, int]:
        """Number of entries and their bytes."""
        try:
            with self._index.session():
                self._write_notes()
                return len(self._index), self._index.nbytes()
        except IndexFailed:
            sizes = self.files().values()
            return len(sizes), sum(sizes)

    def most(self, namespace: str) -> int:
        """The largest entry of a namespace that can be kept, in bytes."""
        quota = quota_of(self._quotas, namespace)
        return self._budget if quota is None else min(self._budget, quota)

    def make_room(self, digest: str, namespace: str, nbytes: int) -> None:
        """Evict for an entry that is about to be written, so that a medium of the budget's size has room.

        Only if it is needed by what this process knows: until the entry has its name, its bytes come on
        top of the budget anyway, and :meth:`publish` knows what others have written.
        """
        if self._nbytes + nbytes > self._budget:
            with self._index.session():
                self._write_notes()
                self._evict(digest, namespace, nbytes)

    def publish(self, temp: TempFile, digest: str, namespace: str, nbytes: int) -> None:
        """Flush a whole file and give it its name, so that both are there after a power failure.

        Flushed first: a power failure must not leave a torn file in the place of an older entry. (To name
        new files first, so that one commit of the file system's journal covers content and name, gains
        nothing: the folder's fsync waits for the medium all the same.) If it raises, :meth:`settle`.
        """
        try:
            os.fsync(temp.fd)
            self._at("synced")
            with self._index.session():
                self._write_notes()
                held = self._evict(digest, namespace, nbytes)
                self._at("room made")
                self._index.add(digest, namespace, nbytes, new=not held)
                self._at("indexed")
                self._index.commit()
                self._nbytes += nbytes - held
                self._at("committed")
                temp.rename(self.name(digest))
                self._at("renamed")
            sync_folder(self._folder)
            self._at("folder synced")
        except BaseException:
            if temp.named:  # it was promised to nobody, and might not be there after a power failure
                self.remove(digest, os.fstat(temp.fd))
            raise

    def settle(self, digest: str) -> None:
        """Make the row of an entry agree with its file, if the index can be written."""
        with suppress(IndexFailed), self._index.session():
            self._settle(digest)
            self._nbytes = self._index.nbytes()

    def remove(self, digest: str, seen: os.stat_result | None = None) -> bool:
        """Delete an entry, even if the index cannot follow; False if the file is still there.

        ``seen``: only if it is still that file; a writer may have put a whole one in its place.
        """
        path = self.path(digest)
        try:
            with suppress(IndexFailed), self._index.session():
                if seen is None or _same(path, seen):
                    path.unlink(missing_ok=True)
                    self._at("removed")
                    self._index.remove(digest)
                return True
            path.unlink(missing_ok=True)
        except OSError as error:
            self._counters.warn_once("remove", "cannot delete from %s: %s", self._folder, error)
            return False
        return True

    def note(self, digest: str, found: bool) -> None:
        """Remember that an entry was used, or was not there; written down with the next change.

        A use costs no transaction that way. In a crash, the order of the last uses is lost, no more.
        """
        with self._noting:
            self._used.pop(digest, None)
            if found:
                self._used[digest] = None
            else:
                self._missed.add(digest)
            if len(self._used) + len(self._missed) < _NOTES:
                return
        with suppress(IndexFailed), self._index.session(wait=False):
            self._write_notes()
            self._shrink(self._budget)

    def rebuild(self) -> None:
        """Bring the index to agree with the files, from nothing if it is damaged; drop what is no entry."""
        with exclusive(self._folder / "lock"):
            sweep_orphans(self._folder)
            self._restore()

    def start_over(self) -> None:
        """As :meth:`rebuild`, trusting no row."""
        with exclusive(self._folder / "lock"):
            self._index.discard()
            sweep_orphans(self._folder)
            self._restore()

    def sync(self) -> None:
        """Make deletions survive a power failure."""
        with suppress(OSError):
            sync_folder(self._folder)

    def close(self) -> None:
        """Write down the order of use and close the index."""
        with suppress(IndexFailed), self._index.session():
            self._write_notes()
        self._index.close()

    def _restore(self) -> None:
        try:
            self._reconcile()
        except IndexFailed as error:
            self._counters.warn_once("index", "index rebuilt from the files: %s", error)
            self._index.discard()
            self._reconcile()

    def _reconcile(self) -> None:
        with self._index.session(create=True):
            self._index.check()
            files, rows = self.files(), self._index.rows()
            for digest, nbytes in rows.items():
                if files.get(digest) != nbytes:
                    self._index.remove(digest)
            for digest, nbytes in files.items():
                if rows.get(digest) != nbytes:
                    self._settle(digest)
            for namespace in self._index.namespaces():
                quota = quota_of(self._quotas, namespace)
                if quota is not None:  # it may be smaller than last time
                    self._shrink(quota, namespace)
            self._shrink(self._budget)

    def _write_notes(self) -> None:
        with self._noting:
            used, self._used = self._used, {}
            missed, self._missed = self._missed, set()
        if used or missed:
            missed.update(self._index.touch(list(used)))
            for digest in missed:
                self._settle(digest)
            self._at("uses noted")

    def _settle(self, digest: str) -> None:
        path = self.path(digest)
        try:
            nbytes = os.lstat(path).st_size
            if self._index.size(digest) != nbytes:
                self._index.add(digest, read_key(path).namespace, nbytes)
        except FileNotFoundError:
            self._index.remove(digest)
        except EntryDamaged as error:  # nobody could ever read it
            self._counters.warn_once("damaged", "dropped a damaged entry: %s", error)
            self._counters.count("damaged")
            path.unlink(missing_ok=True)
            self._index.remove(digest)

    def _evict(self, digest: str, namespace: str, nbytes: int) -> int:
        """Evict until ``nbytes`` under ``digest``, in place of what it has now, fit; returns what that is."""
        held, self._nbytes = self._index.held(digest)
        quota = quota_of(self._quotas, namespace)
        if quota is not None:
            self._shrink(quota - nbytes + held, namespace, but=digest)
        if self._nbytes - held + nbytes > self._budget:
            self._shrink(self._budget - nbytes + held, but=digest)
        return held

    def _shrink(self, most: int, namespace: str | None = None, but: str = "") -> None:
        while (nbytes := self._index.nbytes(namespace)) > most:
            victim = self._index.oldest(but, namespace)
            self.path(victim).unlink(missing_ok=True)
            self._at("evicted")
            self._index.remove(victim)
            self._counters.count("evictions")
        if namespace is None:
            self._nbytes = nbytes


def entry_files(folder: Path) -> dict[str, int]:
    """Digest → size of every entry file in a folder, least recently written first."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _ENTRY_NAME.fullmatch(entry.name)
            if match:
                with suppress(FileNotFoundError):  # another process evicted it just now
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, match[1], status.st_size))
    return {digest: size for _, digest, size in sorted(found)}


def _same(path: Path, seen: os.stat_result) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and os.path.samestat(status, seen)
