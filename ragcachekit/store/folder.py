"""The disk tier's folder: who may use it, files that appear whole or not at all, orphans, locks."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from ragcachekit.errors import StoreError
from ragcachekit.files import OpenFile, make_folder, open_regular
from ragcachekit.store.durable import write_all

_TEMP_NAME = re.compile(r"(\d+)-([0-9a-f]{8})[0-9a-f]{8}\.tmp")
_LOCK_POLL = 0.0005  # seconds


def open_folder(path: Path) -> None:
    """:func:`claim_folder`, and StoreError also if it cannot be written to."""
    claim_folder(path)
    with _explained(path), temp_file(path) as temp:
        write_all(temp.fd, [b"\0"])


def claim_folder(path: Path) -> None:
    """Create ``path`` with mode 0700, or check that an existing one is ours alone to write.

    Raises
    ------
    StoreError
        If it cannot be created, is not a folder, belongs to another user, or others may write to it.
    """
    with _explained(path):
        make_folder(path)
        _refuse_foreign(path, path.stat())


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What fails with this folder inside is a StoreError that says what to do."""
    try:
        yield
    except FileExistsError as error:
        raise StoreError(f"{path} is a file; give the disk tier a folder of its own") from error
    except OSError as error:
        raise StoreError(
            f"cannot write to the cache folder {path}: {error.strerror or error}; "
            "make it writable, free some space, choose another disk_path, or use disk_path=None"
        ) from error


def _refuse_foreign(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise StoreError(
            f"the cache folder {path} belongs to uid {status.st_uid}, this process runs as {os.geteuid()}; "
            "KV written by somebody else is not trusted: choose another disk_path"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(
            f"others may write to the cache folder {path} (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run `chmod 700 {path}` or choose another disk_path"
        )


@contextmanager
def exclusive(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock file ``path`` against other processes; the kernel frees it if this one dies.

    Raises
    ------
    BlockingIOError
        If somebody else has held it for ``seconds``.
    OSError
        If the file cannot be opened.
    """
    by, file = os.getpid(), locked(path, seconds)
    try:
        yield
    finally:
        release(file, by)


def locked(path: Path, seconds: float) -> OpenFile:
    """The lock file ``path``, open, with its lock held until its :func:`release`.

    Raises
    ------
    BlockingIOError
        If somebody else has held it for ``seconds``.
    OSError
        If the file cannot be opened.
    """
    file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        lock_within(file.fd, seconds, fcntl.LOCK_EX, path)
    except BaseException:
        file.close()
        raise
    return file


def release(file: OpenFile, by: int) -> None:
    """Unlock and close a file that process ``by`` locked.

    Closing alone is not enough: a child forked meanwhile has a copy of the descriptor, and the lock with
    it, for as long as it lives. The child itself must not unlock: that would free its parent's lock.
    """
    if by == os.getpid():
        _flock(file.fd, fcntl.LOCK_UN)
    file.close()


def lock_within(fd: int, seconds: float | None, how: int, path: Path) -> None:
    """Lock an open file in the way of ``flock``; nothing happens where the file system knows no locks.

    Raises
    ------
    BlockingIOError
        If somebody else has held it for ``seconds`` (None: wait for ever).
    """
    if seconds is None:
        _flock(fd, how)
        return
    end = time.monotonic() + seconds
    while True:
        try:
            _flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= end:
                message = f"another process or thread has held this lock for {seconds:g} s; is it stopped?"
                raise BlockingIOError(errno.EAGAIN, message, str(path)) from error
            time.sleep(_LOCK_POLL)  # the kernel has no lock with a deadline
        else:
            return


class TakenAway(OSError):
    """Somebody removed a file that was still being written, see :func:`unfinished`."""


class TempFile:
    """A file that is being written, open as long as the context of :func:`temp_file`."""

    def __init__(self, file: OpenFile, path: str) -> None:
        self.file, self.path, self.named = file, path, False

    @property
    def fd(self) -> int:
        """Its descriptor."""
        return self.file.fd

    def rename(self, name: str) -> None:
        """Give it its final name, in place of what has that now.

        Raises
        ------
        TakenAway
            If it is not there any more.
        """
        try:
            os.replace(self.path, name)
        except FileNotFoundError as error:
            raise TakenAway(f"{self.path} was taken away while it was written") from error
        self.named = True


@contextmanager
def temp_file(folder: str | os.PathLike[str], whose: str = "") -> Iterator[TempFile]:
    """A new file of mode 0600, removed on leaving unless it was renamed.

    Its lock tells other processes that its writer is alive, see :func:`sweep_orphans`; its name tells them
    ``whose`` it is to be, see :func:`unfinished`.
    """
    temp = TempFile(*_create_locked(folder, _mark(whose)))
    try:
        yield temp
    finally:
        if not temp.named:
            with suppress(OSError):  # the medium fails: the next start sweeps it
                os.unlink(temp.path)
        with suppress(OSError):  # what had to reach the medium was flushed before
            temp.file.close()


def _mark(whose: str) -> str:
    return blake2b(whose.encode(errors="surrogatepass"), digest_size=4).hexdigest()


def _create_locked(folder: str | os.PathLike[str], mark: str) -> tuple[OpenFile, str]:
    while True:
        path = os.path.join(folder, f"{os.getpid()}-{mark}{secrets.token_hex(4)}.tmp")
        file = OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        _flock(file.fd, fcntl.LOCK_EX)
        if os.fstat(file.fd).st_nlink:
            return file, path
        file.close()  # a sweep came between creation and lock and took it for an orphan


def orphans(folder: Path) -> Iterator[Path]:
    """Temporary files whose writer is gone.

    The lock decides, not the pid in the name: pids are reused, and differ between containers.
    """
    for path in folder.iterdir():
        match = _TEMP_NAME.fullmatch(path.name)
        if match and _abandoned(path, int(match[1])):
            yield path


def unfinished(folder: Path, whose: str) -> Iterator[Path]:
    """Temporary files of ``whose``, with or without a living writer (and in one of 2^32 cases another's).

    Whoever removes one keeps it from getting its name.
    """
    mark = _mark(whose)
    for path in folder.iterdir():
        match = _TEMP_NAME.fullmatch(path.name)
        if match and match[2] == mark:
            yield path


def sweep_orphans(folder: Path) -> int:
    """Remove temporary files whose writer is gone; returns how many."""
    swept = 0
    for path in orphans(folder):
        with suppress(FileNotFoundError):
            path.unlink()
            swept += 1
    return swept


def _abandoned(path: Path, pid: int) -> bool:
    try:
        file = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # gone, or nothing that we made: it is left alone
        return False
    by = os.getpid()
    try:
        return _flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB) or not _alive(pid)
    except BlockingIOError:
        return False
    finally:
        release(file, by)


def _flock(fd: int, operation: int) -> bool:
    """False where the file system knows no locks; BlockingIOError where somebody else holds it."""
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
