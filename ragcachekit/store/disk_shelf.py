"""The files of the disk tier and the index over them, changed together."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ragcachekit.store.base import concerns, quota_of
from ragcachekit.store.counters import Counters
from ragcachekit.store.durable import sync_folder
from ragcachekit.store.entry_file import At, EntryReader, entry_name, read_key
from ragcachekit.store.entry_header import EntryDamaged
from ragcachekit.store.folder import TempFile, exclusive, open_folder, sweep_orphans, unfinished
from ragcachekit.store.index import EntryIndex
from ragcachekit.store.index_file import SECONDS_TO_LOCK, IndexDamaged, IndexFailed, Revision
from ragcachekit.store.notes import Notes

_ENTRY_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")
_NOBODY = ""  # whose files are that can be neither read nor deleted: they count, under no quota
_MOST_STUCK = 8  # files that one eviction passes over because they cannot be deleted
SECONDS_TO_OPEN = 60.0
"""How long opening waits for another process that opens the folder or rebuilds the index."""


class Reserved(NamedTuple):
    """What counts for an entry that has no name yet, and since which revision of the index."""

    nbytes: int
    revision: Revision | None


class Shelf:
    """Entry files in one folder, kept within a budget; several processes may share it.

    The files are the truth. Every change of a file stands inside a session of the index. A file goes before
    its row, and comes after its row was committed: whoever is killed in between leaves a row that says too
    much, never a file that nobody counts.

    Parameters
    ----------
    folder : Path
        Nothing is written to it before :meth:`open`.
    budget : int
        Bytes of all entry files together.
    quotas : mapping of str to int
        Bytes of single namespaces (``*``: every other one).
    counters : Counters
        Hears of evictions and of damaged files.
    at : callable
        Hears of every step worth being killed at.
    """

    def __init__(
        self, folder: Path, budget: int, quotas: Mapping[str, int], counters: Counters, at: At
    ) -> None:
        self._folder, self._budget, self._quotas = folder, budget, dict(quotas)
        self._prefix = os.path.join(folder, "")
        self._counters, self._at = counters, at
        self._notes = Notes()
        self._nbytes = 0  # of all entries, when this process last looked
        self._index = EntryIndex(folder / "index")

    def open(self, seconds: float) -> None:
        """Have the folder ready for writing: the index agrees with the files, all is within the budget.

        Raises
        ------
        StoreError, OSError
            If the folder or the index cannot be used, or others keep it busy for longer than ``seconds``.
        """
        open_folder(self._folder)
        self._index.open()
        self.rebuild(seconds)

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
        """Digest → namespace as the index has it; IndexFailed if it cannot say."""
        with self._index.session():
            return self._index.owners()

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
        top of the budget anyway, and :meth:`reserve` knows what others have written.
        """
        if self._nbytes + nbytes > self._budget:
            with self._index.session():
                self._write_notes()
                self._evict(digest, namespace, nbytes)

    def reserve(self, digest: str, namespace: str, nbytes: int) -> Reserved:
        """Count an entry that is written but has no name yet, and evict for it; see :meth:`publish`.

        Before it is flushed: the medium is at work on it meanwhile, and nobody waits for the index while
        somebody else waits for the medium. If it raises, :meth:`settle`.
        """
        with self._index.session():
            self._write_notes()
            return self._reserve(digest, namespace, nbytes)

    def publish(self, temp: TempFile, digest: str, namespace: str, nbytes: int, reserved: Reserved) -> None:
        """Flush a whole file and give it its name, so that both are there after a power failure (the name
        only if the folder can be flushed, too).

        Flushed first: a power failure must not leave a torn file in the place of an older entry. (To name
        new files first, so that one commit of the file system's journal covers content and name, gains
        nothing: the folder's fsync waits for the medium all the same.) If it raises, :meth:`settle`. A file
        that has its name by then keeps it: the older one is gone already, and this one is whole.
        """
        os.fsync(temp.fd)
        self._at("synced")
        counted = reserved.nbytes
        with self._index.standstill(reserved.revision) as same:
            if same:
                self._name(temp, digest)
        if not same:
            with self._index.session():
                counted = self._reserve(digest, namespace, nbytes).nbytes
                self._name(temp, digest)
        if counted > nbytes:
            self.settle(digest)
        try:
            sync_folder(self._folder)
        except OSError as error:  # it can be read, so it is not refused; a power failure may take it
            self._counters.warn_once("sync", "cannot flush %s: %s", self._folder, error)
        self._at("folder synced")

    def settle(self, digest: str) -> None:
        """Make the row of an entry agree with its file, if the index can be written."""
        with suppress(IndexFailed, OSError), self._index.session():
            self._settle(digest)
            self._nbytes = self._index.nbytes()

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
            self._counters.warn_once("remove", "cannot delete from %s: %s", self._folder, error)
            return False
        return True

    def note(self, digest: str, found: bool) -> None:
        """Remember that an entry was used, or was not there; written down with the next change.

        A use costs no transaction that way. In a crash, the order of the last uses is lost, no more.
        """
        if not self._notes.add(digest, found):
            return
        with suppress(IndexFailed, OSError):
            try:
                with self._index.session(seconds=0.0):
                    self._write_notes()
                    self._shrink(self._budget)
            except IndexDamaged:  # a process that only reads would never hear of it otherwise
                self.rebuild(0.0)

    def rebuild(self, seconds: float = SECONDS_TO_LOCK) -> None:
        """Bring the index to agree with the files, from nothing if it is damaged; drop what is no entry.

        Raises
        ------
        OSError, IndexFailed
            Also if others keep the folder busy for longer than ``seconds``.
        """
        with exclusive(self._folder / "lock", seconds):
            sweep_orphans(self._folder)
            self._restore(seconds)

    def start_over(self) -> None:
        """As :meth:`rebuild`, trusting no row."""
        with exclusive(self._folder / "lock", SECONDS_TO_OPEN):
            self._index.discard()
            sweep_orphans(self._folder)
            self._restore(SECONDS_TO_OPEN)

    def interrupt(self, namespace: str, chunk_ids: frozenset[str] | None) -> None:
        """Let no write under way, of any process, bring back what is to be forgotten.

        Its temporary file is taken away, whatever it is for if that cannot be read yet. Files that get their
        names meanwhile are there for whoever lists the folder afterwards.

        Raises
        ------
        OSError
            If one may be left.
        """
        concerned = [
            path
            for path in unfinished(self._folder, namespace)
            if not _is_of_others(path, namespace, chunk_ids)
        ]
        left = [path for path in concerned if not self._deleted(path)]
        if left:
            raise OSError(errno.EIO, "cannot take away what is just being written", str(left[0]))

    def sync(self) -> None:
        """Make deletions survive a power failure."""
        with suppress(OSError):
            sync_folder(self._folder)

    def close(self) -> None:
        """Write down the order of use and close the index."""
        with suppress(IndexFailed, OSError), self._index.session():
            self._write_notes()
        self._index.close()

    def _restore(self, seconds: float) -> None:
        try:
            self._reconcile(seconds)
        except IndexDamaged as error:
            self._counters.warn_once("index", "index rebuilt from the files: %s", error)
            self._index.discard(seconds)
            self._reconcile(seconds)

    def _reconcile(self, seconds: float) -> None:
        with self._index.session(create=True, seconds=seconds):
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
                if quota is not None and namespace != _NOBODY:  # it may be smaller than last time
                    self._shrink(quota, namespace)
            self._shrink(self._budget)

    def _write_notes(self) -> None:
        used, missed = self._notes.take()
        if used or missed:
            # Nearly all that is missed was never there, and has no row that could be wrong.
            for digest in (*self._index.among(missed), *self._index.touch(used)):
                self._settle(digest)
            self._at("uses noted")

    def _settle(self, digest: str) -> None:
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
            self._counters.warn_once("remove", "cannot delete from %s: %s", self._folder, error)
            return False
        return True

    def _name(self, temp: TempFile, digest: str) -> None:
        temp.rename(self.name(digest))
        self._at("renamed")

    def _reserve(self, digest: str, namespace: str, nbytes: int) -> Reserved:
        held = self._evict(digest, namespace, nbytes)
        self._at("room made")
        counted = max(held, nbytes)  # until the new file has its name, the old one is there
        self._index.add(digest, namespace, counted, new=not held)
        self._at("indexed")
        self._index.commit()
        self._nbytes += counted - held
        self._at("committed")
        return Reserved(counted, self._index.revision())

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
        stuck: set[str] = set()
        while (nbytes := self._index.nbytes(namespace)) > most:
            victim = self._index.oldest(but, namespace)
            try:
                self.path(victim).unlink(missing_ok=True)
            except OSError as error:
                if victim in stuck or len(stuck) == _MOST_STUCK:
                    raise
                self._counters.warn_once("remove", "cannot delete from %s: %s", self._folder, error)
                stuck.add(victim)
                self._index.touch([victim])  # the next one's turn, also the next time
                continue
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


def _is_of_others(path: Path, namespace: str, chunk_ids: frozenset[str] | None) -> bool:
    """Whether an unfinished file is certainly not what is to be forgotten."""
    try:
        with EntryReader(path) as reader:
            return not concerns(reader.header.key, namespace, chunk_ids)
    except (EntryDamaged, OSError):
        return False


def _same(path: Path, seen: os.stat_result) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(status.st_mode) and os.path.samestat(status, seen)
