"""The files of the disk tier and the index over them, changed together."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ragcachekit.files import sync_folder
from ragcachekit.store.base import quota_of
from ragcachekit.store.counters import Counters
from ragcachekit.store.disk.access_log import AccessLog
from ragcachekit.store.disk.folder import FolderLock, IndexFailed, claim_folder, sweep_orphans, temp_file
from ragcachekit.store.disk.index import SECONDS_TO_LOCK, EntryIndex, IndexDamaged
from ragcachekit.store.entry.file import entry_name, read_key
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.store.entry.image import At, EntryImage

_ENTRY_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")
_NOBODY = ""  # whose files are that can be neither read nor deleted: they count, under no quota
_MOST_STUCK = 8  # files that one eviction passes over because they cannot be deleted
SECONDS_TO_OPEN = 60.0
"""How long opening waits for another process that opens the folder or rebuilds the index."""


class EntryFiles:
    """Entry files in one folder, kept within a budget; several processes may share it.

    The files are the truth. Every change of a file stands inside a session of the index, which one process
    has at a time. A file goes before its row, and comes after its row was committed: whoever is killed in
    between leaves a row that says too much, never a file that nobody counts.

    Parameters
    ----------
    folder : Path
        Nothing is written to it before :meth:`open`.
    budget : int
        Bytes of all entry files together.
    quotas : mapping of str to int
        Bytes of single namespaces (``*``: every other one).
    counters : Counters
        Told of evictions and of damaged files.
    at : callable
        Called with the name of every step worth being killed at.
    """

    def __init__(
        self, folder: Path, budget: int, quotas: Mapping[str, int], counters: Counters, at: At
    ) -> None:
        self._folder, self._budget, self._quotas = folder, budget, dict(quotas)
        self._prefix = os.path.join(folder, "")
        self._counters, self._at = counters, at
        self._access_log = AccessLog()
        self._lock = FolderLock(folder / "lock")
        self._index = EntryIndex(folder / "index", self._lock)

    def open(self, seconds: float) -> None:
        """Have the folder ready for writing: the index agrees with the files, all is within the budget.

        Raises
        ------
        StoreError, OSError
            If the folder or the index cannot be used, or others keep it busy for longer than ``seconds``.
        """
        claim_folder(self._folder)
        self.rebuild(seconds)

    def exists(self) -> bool:
        """Whether there is a folder."""
        return self._folder.is_dir()

    def path(self, digest: str) -> Path:
        """Where the entry with this digest stands, if there is one."""
        return Path(self.name(digest))

    def name(self, digest: str) -> str:
        """As :meth:`path`, as text: joining paths is a tenth of what a read costs before its tensors."""
        return self._prefix + entry_name(digest)

    def files(self) -> dict[str, int]:
        """As :func:`entry_files`."""
        return entry_files(self._folder)

    def owners(self) -> dict[str, str]:
        """Digest → namespace as far as the index can say."""
        with suppress(IndexFailed), self._index.session():
            return self._index.owners()
        return {}

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

    def put(self, digest: str, namespace: str, image: EntryImage) -> None:
        """Evict for an entry, write it, and give it its name.

        Nobody else changes the folder meanwhile, so that the budget holds, a temporary file whose writer
        does not hold the lock is an orphan, and a ``forget`` finds either no entry or a whole one.

        Raises
        ------
        OSError, IndexFailed
            With what was there under ``digest`` unchanged.
        """
        with self._index.session():
            self._write_notes()
            held = self._evict(digest, namespace, image.nbytes)
            self._at("room made")
            with temp_file(self._folder) as temp:
                self._at("created")
                image.write(temp.fd, self._at)
                try:
                    # The larger of both sizes counts until the old file is gone.
                    self._index.add(digest, namespace, max(held, image.nbytes))
                    self._at("indexed")
                    self._index.commit()
                    self._at("committed")
                    temp.rename(self.name(digest))
                    self._at("renamed")
                finally:
                    if held > image.nbytes or not temp.named:
                        self._settle(digest)

    def make_space(self, nbytes: int, but: str) -> bool:
        """Delete the least recently used entries of ``nbytes`` together, as the volume is full.

        False, with nothing deleted, if all of them but ``but`` are smaller than that. Where the index cannot
        be read, the least recently written ones go.
        """
        sizes = {digest: size for digest, size in self.files().items() if digest != but}
        if sum(sizes.values()) < nbytes:
            return False
        rows: Mapping[str, int] = {}
        with suppress(IndexFailed), self._index.session():
            self._write_notes()
            rows = self._index.rows()
        for digest in (*(row for row in rows if row in sizes), *(size for size in sizes if size not in rows)):
            if nbytes <= 0:
                break
            if self.remove(digest):
                self._counters.count("evictions")
                nbytes -= sizes[digest]
        return nbytes <= 0

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
            if seen is None or _same(path, seen):
                path.unlink(missing_ok=True)
        except OSError as error:
            self._say_stuck(error)
            return False
        return True

    def note(self, digest: str) -> None:
        """Remember that an entry was used; written down with the next change.

        A use costs no transaction that way. In a crash, the order of the last uses is lost, no more.
        """
        if not self._access_log.add(digest):
            return
        with suppress(IndexFailed, OSError):
            try:
                with self._index.session(seconds=0.0):
                    self._write_notes()
                    self._shrink(self._budget)
            except IndexDamaged:  # a process that only reads would never be told otherwise
                self.rebuild(0.0)

    def rebuild(self, seconds: float = SECONDS_TO_LOCK, *, anew: bool = False) -> None:
        """Bring the index to agree with the files, from nothing if it is damaged; drop what is no entry.

        ``anew``: trust no row. OSError or IndexFailed if the folder cannot be listed, or not be locked within
        ``seconds``, or the index cannot be written.
        """
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
        """Have every put that is being written end, and remove what dead writers left; raises as the lock."""
        with self._lock.held(seconds):
            sweep_orphans(self._folder)

    def sync(self) -> None:
        """Make deletions survive a power failure."""
        sync_folder(self._folder)

    def close(self) -> None:
        """Write down the order of use and close the index."""
        with suppress(IndexFailed, OSError), self._index.session():
            self._write_notes()
        self._index.close()

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
            for namespace in self._index.sum_up():
                quota = quota_of(self._quotas, namespace)
                if quota is not None and namespace != _NOBODY:  # it may be smaller than last time
                    self._shrink(quota, namespace)
            self._shrink(self._budget)

    def _write_notes(self) -> None:
        used = self._access_log.take()
        if used:
            self._index.touch(used)
            self._at("uses noted")

    def _settle(self, digest: str) -> None:
        """Make the row of an entry agree with its file."""
        try:
            nbytes = os.lstat(self.name(digest)).st_size
            if self._index.size(digest) != nbytes:
                self._index.add(digest, self._whose(self.path(digest)), nbytes)
        except FileNotFoundError:
            self._index.remove(digest)

    def _whose(self, path: Path) -> str:
        """The namespace of an entry, nobody's if that cannot be told; a damaged file is deleted."""
        try:
            return read_key(path).namespace
        except FileNotFoundError:
            raise
        except EntryDamaged as error:  # nobody could ever read it
            self._counters.warn_once("damaged", "dropped a damaged entry: %s", error)
            self._counters.count("damaged")
            if self._deleted(path):
                raise FileNotFoundError from error
        except OSError as error:
            self._counters.warn_once("read", "cannot read from %s: %s", self._folder, error)
        return _NOBODY

    def _deleted(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._say_stuck(error)
            return False
        return True

    def _evict(self, digest: str, namespace: str, nbytes: int) -> int:
        """Evict until ``nbytes`` under ``digest``, in place of what it has now, fit; returns what that is."""
        held, quota = self._index.size(digest), quota_of(self._quotas, namespace)
        if quota is not None:
            self._shrink(quota - nbytes + held, namespace, but=digest)
        self._shrink(self._budget - nbytes + held, but=digest)
        return held

    def _shrink(self, most: int, namespace: str | None = None, but: str = "") -> None:
        stuck: set[str] = set()
        while self._index.nbytes(namespace) > most:
            victim = self._index.oldest(but, namespace)
            try:
                self.path(victim).unlink(missing_ok=True)
            except OSError as error:
                if victim in stuck or len(stuck) == _MOST_STUCK:
                    raise
                self._say_stuck(error)
                stuck.add(victim)
                self._index.touch([victim])  # the next one's turn, also the next time
                continue
            self._at("evicted")
            self._index.remove(victim)
            self._counters.count("evictions")

    def _say_stuck(self, error: OSError) -> None:
        self._counters.warn_once("remove", "cannot delete from %s: %s", self._folder, error)


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
    return not stat.S_ISDIR(status.st_mode) and os.path.samestat(status, seen)
