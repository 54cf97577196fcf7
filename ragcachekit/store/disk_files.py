"""The folder of the disk tier: its lock, and entry files written, listed and evicted within a budget."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from filelock import FileLock, Timeout

from ragcachekit.errors import StoreError
from ragcachekit.files import (
    NO_FOLLOW,
    OpenFile,
    belongs_to_another,
    make_folder,
    open_regular,
    others_may_write,
    parse_json,
    read_regular,
    write_all,
)
from ragcachekit.store.base import Counters, quota_of
from ragcachekit.store.entry import At, EntryDamaged, EntryImage, entry_name, read_key

_TEMP_NAME = re.compile(r"\d+-[0-9a-f]{16}\.tmp")
_LOCK_POLL = 0.001  # seconds between tries, as no system has a lock with a deadline


class LockFailed(StoreError):
    """The folder's lock cannot be used now."""


class FolderBusy(LockFailed):
    """Another process or thread has held the folder's lock for too long."""


def claim_folder(path: Path) -> None:
    """Create ``path`` with mode 0700; StoreError if it is no folder or, on POSIX, not ours alone to write."""
    try:
        make_folder(path)
        status = path.stat()
    except FileExistsError as error:
        raise StoreError(f"{path} is a file; give the disk tier a folder of its own") from error
    except OSError as error:
        raise not_writable(path, error) from error
    if belongs_to_another(status):
        raise StoreError(
            f"the cache folder {path} belongs to uid {status.st_uid}, this process runs as {os.geteuid()}; "
            "KV written by somebody else is not trusted: choose another disk_path"
        )
    if others_may_write(status):
        raise StoreError(
            f"others may write to the cache folder {path} (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run `chmod 700 {path}` or choose another disk_path"
        )


def not_writable(folder: Path, error: OSError | StoreError) -> StoreError:
    """The error for a folder that cannot be written to."""
    return StoreError(
        f"cannot write to the cache folder {folder}: {error}; "
        "make it writable, free some space, choose another disk_path, or use disk_path=None"
    )


class FolderLock:
    """A lock file shared by processes; its holder may enter again, and a dead holder frees it.

    The folder of ``path`` is made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = RLock()
        self._file = FileLock(path, mode=0o600, thread_local=False, poll_interval=_LOCK_POLL)

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Keep other threads and processes out; FolderBusy after ``seconds``, else LockFailed."""
        if not self._mutex.acquire(timeout=seconds):
            raise FolderBusy(f"another thread has held {self._path} for {seconds:g} s; is it stopped?")
        try:
            self._acquire(seconds)
            try:
                yield
            finally:
                self._file.release()
        finally:
            self._mutex.release()

    def _acquire(self, seconds: float) -> None:
        try:
            if not os.path.isdir(self._path.parent):  # filelock would make it as the umask allows
                make_folder(self._path.parent)
            self._file.acquire(timeout=seconds)
        except Timeout as error:
            raise FolderBusy(
                f"another process has held {self._path} for {seconds:g} s; is it stopped?"
            ) from error
        except OSError as error:
            raise LockFailed(f"cannot lock {self._path}: {error}") from error


@contextmanager
def temp_file(folder: Path) -> Iterator[tuple[str, OpenFile]]:
    """Name and descriptor of a new file of mode 0600, removed on leaving unless it was renamed.

    The caller holds the folder's lock: without it :func:`sweep_orphans` would remove the file.
    """
    path = os.path.join(folder, f"{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        with OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW) as file:
            yield path, file
    finally:
        with suppress(OSError):  # if the medium fails, the next start sweeps it
            os.unlink(path)


def orphans(folder: Path) -> Iterator[Path]:
    """Temporary files; those of dead writers if the folder's lock is held."""
    return (path for path in folder.iterdir() if _TEMP_NAME.fullmatch(path.name) and not path.is_dir())


def sweep_orphans(folder: Path) -> None:
    """Remove temporary files of dead writers; the folder's lock is held."""
    for path in orphans(folder):
        with suppress(OSError):
            path.unlink()


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

    Parameters are those of :class:`~ragcachekit.store.disk.DiskStore`.
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
