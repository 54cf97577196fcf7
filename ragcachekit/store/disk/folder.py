"""The disk tier's folder: who may use it, the lock around changes, files that appear whole or not at all."""

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
_LOCK_POLL = 0.001  # seconds


class IndexFailed(StoreError):
    """The folder's lock or its index cannot be used now."""


class FolderBusy(IndexFailed):
    """Another process or thread has held the folder's lock for too long."""


def claim_folder(path: Path) -> None:
    """Create ``path`` with mode 0700, or check that an existing one is ours alone to write.

    Raises
    ------
    StoreError
        If it cannot be created, is not a folder, belongs to another user, or others may write to it. Where
        files have no POSIX owners and modes, the last two are not checked.
    """
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
    """The error of a folder that cannot be written to; says what to do."""
    return StoreError(
        f"cannot write to the cache folder {folder}: {error}; "
        "make it writable, free some space, choose another disk_path, or use disk_path=None"
    )


class FolderLock:
    """A lock file that processes share; its holder may enter again, and the system frees it if that dies.

    A forked child has a lock of its own.

    Parameters
    ----------
    path : Path
        The lock file; its folder is made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = RLock()
        # A finite wait between tries, as no system has a lock with a deadline.
        self._file = FileLock(path, mode=0o600, thread_local=False, poll_interval=_LOCK_POLL)

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Keep all other threads and processes out.

        Raises
        ------
        FolderBusy
            If somebody else has held the lock for ``seconds``.
        IndexFailed
            If the lock file cannot be opened or locked.
        """
        mutex, file = self._mutex, self._file
        try:  # begun before it is taken: a KeyboardInterrupt may come as soon as it is
            if not mutex.acquire(timeout=seconds):
                raise FolderBusy(f"another thread has held {self._path} for {seconds:g} s; is it stopped?")
            if file.is_locked:
                yield
                return
            try:
                self._acquire(file, seconds)
                yield
            finally:
                try:
                    file.release(force=True)  # nothing happens if it was not acquired
                finally:
                    file.release(force=True)  # a KeyboardInterrupt may have come before the first one began
        finally:
            try:  # noqa: SIM105 (a call of ``suppress`` comes before the release, and so may an interrupt)
                mutex.release()
            except RuntimeError:  # another thread's
                pass

    def _acquire(self, file: FileLock, seconds: float) -> None:
        try:
            if not os.path.isdir(self._path.parent):  # filelock would make it as the umask allows
                make_folder(self._path.parent)
            file.acquire(timeout=seconds)
        except Timeout as error:
            raise FolderBusy(
                f"another process has held {self._path} for {seconds:g} s; is it stopped?"
            ) from error
        except OSError as error:
            raise IndexFailed(f"cannot lock {self._path}: {error}") from error


class TempFile:
    """A file that is being written, inside the context of :func:`temp_file`."""

    def __init__(self, path: str) -> None:
        self._file = OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW)
        self.path, self.named = path, False

    @property
    def fd(self) -> int:
        """Its descriptor."""
        return self._file.fd

    def close(self) -> None:
        """Close it; also twice."""
        self._file.close()

    def rename(self, name: str) -> None:
        """Close it and give it its final name, in place of what has that now."""
        self.close()  # Windows renames no open file
        os.replace(self.path, name)
        self.named = True


@contextmanager
def temp_file(folder: str | os.PathLike[str]) -> Iterator[TempFile]:
    """A new file of mode 0600, removed on leaving unless it was renamed.

    Whoever makes one holds the folder's lock: :func:`sweep_orphans` takes any other for a dead writer's.
    """
    path, temp = os.path.join(folder, f"{os.getpid()}-{secrets.token_hex(8)}.tmp"), None
    try:
        temp = TempFile(path)
        yield temp
    finally:
        if temp is None or not temp.named:
            with suppress(OSError):
                if temp is not None:
                    temp.close()
                os.unlink(path)  # if the medium fails, the next start sweeps it


def orphans(folder: Path) -> Iterator[Path]:
    """Temporary files; those of dead writers if the folder's lock is held."""
    return (path for path in folder.iterdir() if _TEMP_NAME.fullmatch(path.name) and not path.is_dir())


def sweep_orphans(folder: Path) -> int:
    """Remove temporary files of dead writers, while the folder's lock is held; returns how many."""
    swept = 0
    for path in orphans(folder):
        with suppress(OSError):
            path.unlink()
            swept += 1
    return swept
