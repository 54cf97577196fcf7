"""The folder of the disk tier: its lock, and entry files written, listed and evicted within a budget."""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ragcachekit.errors import StoreError
from ragcachekit.files import (
    NO_FOLLOW,
    OpenFile,
    belongs_to_another,
    make_folder,
    others_may_write,
    write_all,
)
from ragcachekit.store.base import quota_of
from ragcachekit.store.entry import hashed
from ragcachekit.store.eviction import Counters

SECONDS_TO_LOCK = 5.0
"""Longest wait for others who change the folder."""

SECONDS_TO_OPEN = 60.0
"""Longest wait for another process that opens the folder."""

_ENTRY_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{64}\.safetensors")
_TEMP_NAME = re.compile(r"\d+-[0-9a-f]{16}\.tmp")
_LOCK_POLL = 0.001  # seconds between tries, as no system has a lock with a deadline
_ALL = "*"  # group of all entries
_TICK = 1_000  # nanoseconds; where times of files are coarser, every change lists the folder


class LockFailed(StoreError):
    """The folder's lock cannot be used; ``busy`` if others have held it for too long."""

    def __init__(self, why: str, *, busy: bool = False) -> None:
        super().__init__(why)
        self.busy = busy


def claim_folder(path: Path) -> None:
    """Create ``path`` with mode 0700; StoreError if it is no folder or, on POSIX, not ours alone to write."""
    try:
        make_folder(path)
        status = path.stat()
    except FileExistsError as error:
        raise StoreError(f"{path} is a file; give the disk tier a folder of its own") from error
    except OSError as error:
        raise StoreError(
            f"cannot write to the cache folder {path}: {error}; "
            "make it writable, free some space, choose another disk_path, or use disk_path=None"
        ) from error
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


class FolderLock:
    """A lock file shared by processes; its holder may enter again, and a dead holder frees it.

    The folder of ``path`` is made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Each thread has a file of its own, so that the lock keeps other threads out as it does processes.
        self._file = FileLock(path, mode=0o600, poll_interval=_LOCK_POLL)

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Keep other threads and processes out; LockFailed, ``busy`` after ``seconds``."""
        try:
            if not os.path.isdir(self._path.parent):  # filelock would make it as the umask allows
                make_folder(self._path.parent)
            self._file.acquire(timeout=seconds)
        except Timeout as error:
            why = f"others have held {self._path} for {seconds:g} s; is a process stopped?"
            raise LockFailed(why, busy=True) from error
        except OSError as error:
            raise LockFailed(f"cannot lock {self._path}: {error}") from error
        try:
            yield
        finally:
            self._file.release()


class EntryFolder:
    """Entry files in one folder, kept within a budget; several processes may share it.

    A name begins with the hash of the entry's namespace, its group (:func:`group_of`). The modification time
    of a file is the time of its last use. Files are added with the folder's lock held. The folder's own
    modification time, which every change sets anew, says whether others changed it: then it is listed.

    Parameters are those of :class:`~ragcachekit.store.disk.DiskStore`.
    """

    def __init__(self, folder: Path, budget: int, quotas: Mapping[str, int], counters: Counters) -> None:
        self._folder, self._budget, self._counters = folder, budget, counters
        self._quotas = {name if name == "*" else hashed(name): quota for name, quota in quotas.items()}
        self._prefix = os.path.join(folder, "")
        self._lock = FolderLock(folder / "lock")
        # Guarded by the lock.
        self._changed_at: int | None = None  # the folder's modification time when the next two were right
        self._files: dict[str, tuple[int, int]] = {}  # when used and size; least recently used first
        self._nbytes = Counter[str]()  # by group

    def path(self, name: str) -> str:
        """Path of an entry file; as text, since joining paths is a tenth of what a small read costs."""
        return self._prefix + name

    def content(self) -> tuple[int, int]:
        """Number of entries and their bytes."""
        with suppress(OSError):
            sizes = entry_files(self._folder).values()
            return len(sizes), sum(sizes)
        return 0, 0

    def limit(self, name: str) -> int:
        return min(self._budget, quota_of(self._quotas, group_of(name)) or self._budget)

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Evict for an entry and write it; OSError or LockFailed leaves an older file unchanged.

        Not fsynced: what a power failure tears fails its checksums and is computed again, and a sync would
        cost more than the write.
        """
        with self._changing(SECONDS_TO_LOCK):
            nbytes, old = sum(map(len, parts)), self._files.get(name, (0, 0))[1]
            self._shrink(group_of(name), nbytes - old, but=name)
            self._shrink(_ALL, nbytes - old, but=name)
            self._write(name, parts, nbytes)

    def remove(self, name: str, seen: os.stat_result | None = None) -> bool:
        """Delete an entry, even if the folder cannot be locked; False if the file cannot be deleted.

        With ``seen``, that of a damaged file, only if it is still that file, and not one that was put since.
        """
        with ExitStack() as held:
            locked = False
            with suppress(OSError, LockFailed):
                held.enter_context(self._changing(SECONDS_TO_LOCK))
                locked = True
            try:
                if seen is not None and not os.path.samestat(os.lstat(self.path(name)), seen):
                    return True
                os.unlink(self.path(name))
            except FileNotFoundError:
                pass
            except OSError as error:
                self._warn_undeleted(error)
                return False
            if locked:
                self._remove(name)
        return True

    def record_use(self, name: str) -> None:
        with suppress(OSError):  # evicted just now, or on a read-only medium
            _touch(self.path(name))

    def prepare(self, seconds: float) -> None:
        """Remove what dead writers left, and evict down to budget and quotas, which may be smaller now."""
        self.wait_for_writers(seconds)
        with self._changing(seconds):
            for group in [*self._nbytes]:
                self._shrink(group)

    def wait_for_writers(self, seconds: float) -> None:
        """Wait for puts under way, and remove what dead writers left."""
        with self._lock.held(seconds):
            for path in self._folder.iterdir():
                if _TEMP_NAME.fullmatch(path.name):
                    with suppress(OSError):
                        path.unlink()

    @contextmanager
    def _changing(self, seconds: float) -> Iterator[None]:
        """Within it the folder is locked, and what is known of its files is right."""
        with self._lock.held(seconds):
            if os.stat(self._folder).st_mtime_ns != self._changed_at:
                self._list()
            self._changed_at = None  # an error or a kill from here on has the folder listed the next time
            yield
            with suppress(OSError):
                now = time.time_ns()
                _touch(self._folder)
                changed_at = os.stat(self._folder).st_mtime_ns
                if changed_at > now - _TICK:  # a coarser time may be that of somebody's next change too
                    self._changed_at = changed_at

    # -- the lock is held --------------------------------------------------------------------------

    def _list(self) -> None:
        found = _scan(self._folder)
        self._files, self._nbytes = {}, Counter()
        for name, status in found:
            self._add(name, status.st_mtime_ns, status.st_size)

    def _write(self, name: str, parts: Sequence[memoryview], nbytes: int) -> None:
        path = self.path(f"{os.getpid()}-{secrets.token_hex(8)}.tmp")
        try:
            with OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW) as file:
                write_all(file.fd, parts)
            used = _touch(path)
            os.replace(path, self.path(name))
        except BaseException:
            with suppress(OSError):  # if the medium fails, the next start sweeps it
                os.unlink(path)
            raise
        self._remove(name)
        self._add(name, used, nbytes)

    def _add(self, name: str, used: int, nbytes: int) -> None:
        self._files[name] = used, nbytes
        self._nbytes[_ALL] += nbytes
        self._nbytes[group_of(name)] += nbytes

    def _remove(self, name: str) -> None:
        _, nbytes = self._files.pop(name, (0, 0))
        self._nbytes[_ALL] -= nbytes
        self._nbytes[group_of(name)] -= nbytes

    def _shrink(self, group: str, more: int = 0, but: str = "") -> None:
        """Evict least recently used entries of a group, except ``but``, until ``more`` bytes fit."""
        limit, listed = self._budget if group == _ALL else quota_of(self._quotas, group), False
        while limit is not None and self._nbytes[group] > limit - more:
            candidates = (name for name in self._files if name != but and group in (_ALL, group_of(name)))
            victim = next(candidates, None)
            if victim is None:
                raise OSError(f"no entry in {self._folder} can be deleted")
            if not self._evict(victim) and not listed:
                self._list()  # once: what is used from now on is the most recent
                listed = True

    def _evict(self, name: str) -> bool:
        """Delete a file; False if it was used since it was listed, which makes it the last to leave."""
        (used, nbytes), path = self._files[name], self.path(name)
        try:
            if (now := os.lstat(path).st_mtime_ns) != used:
                del self._files[name]
                self._files[name] = now, nbytes
                return False
            os.unlink(path)
            self._counters.count("evictions")
        except FileNotFoundError:  # by somebody who could not lock the folder
            pass
        except OSError as error:
            self._warn_undeleted(error)
            del self._files[name]  # but it goes on counting
            return True
        self._remove(name)
        return True

    def _warn_undeleted(self, error: OSError) -> None:
        self._counters.warn_once("remove", "cannot delete from %s: %s", self._folder, error)


def group_of(name: str) -> str:
    """The hash of the namespace that an entry file belongs to."""
    return name.partition("-")[0]


def digest_of(name: str) -> str:
    """The digest of the key of an entry file."""
    return name.removesuffix(".safetensors").partition("-")[2]


def entry_files(folder: Path) -> dict[str, int]:
    """Name → size of every entry file in a folder, least recently used first."""
    return {name: status.st_size for name, status in _scan(folder)}


def _scan(folder: Path) -> list[tuple[str, os.stat_result]]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _ENTRY_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # another process evicted it just now
                    found.append((entry.name, os.lstat(entry.path)))  # Windows lists older times
    return sorted(found, key=lambda one: (one[1].st_mtime_ns, one[0]))


def _touch(path: str | Path) -> int:
    now = time.time_ns()  # finer than the system's own clock of file times
    os.utime(path, ns=(now, now))
    return now
