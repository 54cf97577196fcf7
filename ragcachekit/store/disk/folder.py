"""The disk tier's folder: who may use it, the lock around changes, and temporary files."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock

from filelock import FileLock, Timeout

from ragcachekit.errors import StoreError
from ragcachekit.files import NO_FOLLOW, OpenFile, belongs_to_another, make_folder, others_may_write

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
