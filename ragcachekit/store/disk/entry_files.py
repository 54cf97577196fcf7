"""The files of the disk tier: written, listed, evicted. The folder itself is all that is recorded of them."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ragcachekit.files import NO_FOLLOW, open_regular, parse_json, read_regular, write_all
from ragcachekit.store.base import quota_of
from ragcachekit.store.counters import Counters
from ragcachekit.store.disk.folder import FolderLock, LockFailed, sweep_orphans, temp_file
from ragcachekit.store.entry.file import entry_name, read_key
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.store.entry.image import At, EntryImage

_ENTRY_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")
_NOBODY = ""  # namespace of files with an unreadable header: they count, under no quota

SECONDS_TO_LOCK = 5.0
"""Longest wait for others who change the folder."""

SECONDS_TO_OPEN = 60.0
"""Longest wait for another process that opens the folder."""


class _File(NamedTuple):
    used: int  # ns since the epoch
    nbytes: int
    namespace: str


class EntryFiles:
    """Entry files in one folder, kept within a budget; several processes may share it.

    The modification time of a file is the time of its last use. Files are added with the folder's lock held.
    The file ``writer`` holds the sums of their sizes, which every change updates; a store lists the folder to
    open it, to find further files to evict, and where the sums are missing. After a kill they may be larger
    than the files, not smaller.

    Parameters are those of :class:`~ragcachekit.store.disk.disk_store.DiskStore`.
    """

    def __init__(
        self, folder: Path, budget: int, quotas: Mapping[str, int], counters: Counters, at: At
    ) -> None:
        self._folder, self._budget, self._quotas = folder, budget, dict(quotas)
        self._prefix = os.path.join(folder, "")
        self._counters, self._at = counters, at
        self._lock = FolderLock(folder / "lock")
        # Guarded by the lock.
        self._writer = folder / "writer"
        self._listed: dict[str, _File] = {}  # candidates for eviction, least recently used first
        self._nbytes = Counter[str | None]()  # by namespace; None: of all
        self._namespaces: dict[str, str] = {}  # by digest; only where there are quotas

    def path(self, digest: str) -> Path:
        """Path of the entry with this digest."""
        return Path(self.name(digest))

    def name(self, digest: str) -> str:
        """As :meth:`path`, as text: joining paths is a tenth of what a read costs before its tensors."""
        return self._prefix + entry_name(digest)

    def content(self) -> tuple[int, int]:
        """Number of entries and their bytes."""
        with suppress(OSError), self._locked_if_possible():
            sizes = entry_files(self._folder).values()
            return len(sizes), sum(sizes)
        return 0, 0

    def most(self, namespace: str) -> int:
        """The largest entry of a namespace that can be kept, in bytes."""
        quota = quota_of(self._quotas, namespace)
        return self._budget if quota is None else min(self._budget, quota)

    def put(self, digest: str, namespace: str, image: EntryImage) -> None:
        """Evict for an entry and write it; OSError or LockFailed leaves an older file unchanged."""
        with self._lock.held(SECONDS_TO_LOCK), self._sums():
            more = image.nbytes - self._size(digest)
            quota = quota_of(self._quotas, namespace)
            if quota is not None:
                self._shrink(quota - more, namespace, but=digest)
            self._shrink(self._budget - more, but=digest)
            self._at("room made")
            with temp_file(self._folder) as (path, file):
                self._at("created")
                image.write(file.fd, self._at)
                file.close()  # Windows renames no open file
                _touch(path)
                self._count(namespace, more)
                self._write_sums()  # before the file counts, lest a kill leaves it uncounted
                os.replace(path, self.name(digest))
                self._at("renamed")
            if self._quotas:
                self._namespaces[digest] = namespace

    def make_space(self, nbytes: int, but: str) -> bool:
        """Evict least recently used entries of ``nbytes`` together, as the volume is full.

        False, with nothing deleted, if all of them but ``but`` are smaller.
        """
        sizes = {digest: size for digest, size in entry_files(self._folder).items() if digest != but}
        if sum(sizes.values()) < nbytes:
            return False
        for digest, size in sizes.items():
            if nbytes > 0 and self.remove(digest):
                self._counters.count("evictions")
                nbytes -= size
        return nbytes <= 0

    def remove(self, digest: str, seen: os.stat_result | None = None) -> bool:
        """Delete an entry, even if the folder cannot be locked; False if the file cannot be deleted.

        With ``seen``, that of a damaged file, only if it is still that file, and not one that was put since.
        """
        path = self.path(digest)
        with self._locked_if_possible() as locked:
            namespace = self._namespaces.get(digest, _NOBODY)
            if self._quotas and not namespace:
                namespace = self._namespace(digest)
            try:
                status = os.lstat(path)
                if seen is not None and not os.path.samestat(status, seen):
                    return True
                path.unlink()
            except FileNotFoundError:
                return True
            except OSError as error:
                self._warn_undeleted(error)
                return False
            self._at("removed")
            with suppress(OSError):
                countable = seen is None and (namespace or not self._quotas)  # damage may change the size
                if locked and countable and self._read_sums():
                    self._count(namespace, -status.st_size)
                    self._write_sums()
                else:
                    self._writer.unlink(missing_ok=True)
        return True

    def record_use(self, digest: str) -> None:
        """Make an entry the most recently used one."""
        with suppress(OSError):  # evicted just now, or on a read-only medium
            _touch(self.name(digest))

    def prepare(self, seconds: float) -> None:
        """Remove what dead writers left, and evict down to budget and quotas, which may be smaller now."""
        with self._lock.held(seconds), self._sums(anew=True):
            sweep_orphans(self._folder)
            for namespace in list(self._nbytes):
                quota = quota_of(self._quotas, namespace) if namespace else None
                if quota is not None:
                    self._shrink(quota, namespace)
            self._shrink(self._budget)
            self._write_sums()

    def wait_for_writers(self, seconds: float) -> None:
        """Wait for puts under way, and remove what dead writers left."""
        with self._lock.held(seconds):
            sweep_orphans(self._folder)

    @contextmanager
    def _locked_if_possible(self) -> Iterator[bool]:
        with ExitStack() as held:
            locked = False
            with suppress(LockFailed):
                held.enter_context(self._lock.held(SECONDS_TO_LOCK))
                locked = True
            yield locked

    @contextmanager
    def _sums(self, anew: bool = False) -> Iterator[None]:
        """Within it ``_nbytes`` agree with the files, unless some were removed by hand."""
        try:
            if anew or not self._read_sums():
                self._list()
            yield
        except BaseException:
            with suppress(OSError):
                self._writer.unlink()  # the next time, list the folder
            raise

    def _read_sums(self) -> bool:
        """Set ``_nbytes`` to the sums in ``writer``; False if it lacks them, or those of namespaces."""
        with suppress(OSError, ValueError, TypeError, AttributeError, OverflowError):
            total, spaces = parse_json(read_regular(self._writer))
            if spaces is not None or not self._quotas:
                sums: dict[str | None, int] = {str(name): int(size) for name, size in (spaces or {}).items()}
                self._nbytes = Counter(sums | {None: int(total)})
                return True
        return False

    def _write_sums(self) -> None:
        spaces = {name: nbytes for name, nbytes in self._nbytes.items() if name is not None and nbytes}
        text = json.dumps([self._nbytes[None], spaces if self._quotas else None])
        with open_regular(self._writer, os.O_WRONLY | os.O_CREAT | NO_FOLLOW) as file:
            os.ftruncate(file.fd, write_all(file.fd, [text.encode()]))

    def _list(self) -> None:
        known, self._namespaces = self._namespaces, {}
        self._listed, self._nbytes = {}, Counter()
        for digest, status in _scan(self._folder):
            if self._quotas:
                self._namespaces[digest] = known.get(digest) or self._namespace(digest)
            file = _File(status.st_mtime_ns, status.st_size, self._namespaces.get(digest, _NOBODY))
            self._listed[digest] = file
            self._count(file.namespace, file.nbytes)

    def _count(self, namespace: str, nbytes: int) -> None:
        self._nbytes[None] += nbytes
        self._nbytes[namespace] += nbytes

    def _namespace(self, digest: str) -> str:
        try:
            return read_key(self.path(digest)).namespace
        except (EntryDamaged, OSError):
            return _NOBODY

    def _size(self, digest: str) -> int:
        try:
            return os.lstat(self.name(digest)).st_size
        except FileNotFoundError:
            return 0

    def _shrink(self, most: int, namespace: str | None = None, but: str = "") -> None:
        """Evict least recently used entries (of a namespace) except ``but`` down to ``most`` bytes."""
        listed = False
        while self._nbytes[namespace] > most:
            candidates = (
                digest
                for digest, file in self._listed.items()
                if digest != but and namespace in (None, file.namespace)
            )
            victim = next(candidates, None)
            if victim is not None:
                self._evict(victim)
            elif not listed:
                self._list()
                listed = True
            else:
                raise OSError(f"no entry in {self._folder} can be deleted")

    def _evict(self, digest: str) -> None:
        """Delete a file, unless it was used or removed since it was listed."""
        file, path = self._listed.pop(digest), self.path(digest)
        try:
            if os.lstat(path).st_mtime_ns != file.used:
                return
            path.unlink()
            self._at("evicted")
            self._counters.count("evictions")
        except FileNotFoundError:  # subtracted by the store that removed it
            return
        except OSError as error:
            self._warn_undeleted(error)
            return
        self._count(file.namespace, -file.nbytes)

    def _warn_undeleted(self, error: OSError) -> None:
        self._counters.warn_once("remove", "cannot delete from %s: %s", self._folder, error)


def entry_files(folder: Path) -> dict[str, int]:
    """Digest → size of every entry file in a folder, least recently used first."""
    return {digest: status.st_size for digest, status in _scan(folder)}


def _scan(folder: Path) -> list[tuple[str, os.stat_result]]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _ENTRY_NAME.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # another process evicted it just now
                    found.append((match[1], os.lstat(entry.path)))  # Windows lists older times
    return sorted(found, key=lambda one: (one[1].st_mtime_ns, one[0]))


def _touch(path: str) -> None:
    now = time.time_ns()  # finer than the system's own clock of file times
    os.utime(path, ns=(now, now))
