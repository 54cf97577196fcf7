"""Small private files and folders, opened without blocking and readable by this user alone."""

from __future__ import annotations

import json
import os
import stat
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""Flag that refuses a symbolic link; 0 on systems that cannot refuse one."""

# A FIFO would wait for its other end; Windows would translate line ends and hand files to child processes.
_ALWAYS = 0
for _flag in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY", "O_NOINHERIT"):
    _ALWAYS |= getattr(os, _flag, 0)


class OpenFile:
    """One open descriptor ``fd``, closed with its last reference at the latest; -1 once it is closed.

    Arguments and errors are those of :func:`os.open`; a FIFO does not block. New files have the mode 0600.
    """

    fd = -1

    def __init__(self, path: str | os.PathLike[str], flags: int) -> None:
        self.fd = os.open(path, flags | _ALWAYS, 0o600)

    def close(self) -> None:
        """Close the descriptor; may be repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def read_regular(path: str | os.PathLike[str], *, own: bool = False) -> bytes:
    """All bytes of a regular file; OSError for a folder, FIFO, socket or device of that name.

    ``own``: ValueError if it belongs to another user, or others may write to it (POSIX only).
    """
    with OpenFile(path, os.O_RDONLY) as file:
        status = os.fstat(file.fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file; remove it")
        if own and (belongs_to_another(status) or others_may_write(status)):
            raise ValueError(f"{os.fspath(path)} belongs to or can be written by others")
        with os.fdopen(os.dup(file.fd), "rb") as reader:
            return reader.read()


def belongs_to_another(status: os.stat_result) -> bool:
    """Whether a file or folder is another user's; False where files have no numeric owners."""
    return hasattr(os, "geteuid") and status.st_uid != os.geteuid()


def others_may_write(status: os.stat_result) -> bool:
    """Whether the mode allows other users to write; False where modes have no such bits."""
    return hasattr(os, "geteuid") and bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def write_all(fd: int, parts: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write all of ``parts`` in order."""
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes:  # the system may write less, from 2 GiB on
            view = view[os.write(fd, view) :]


def read_into(fd: int, view: memoryview, offset: int) -> int:
    """Read from ``offset`` into ``view``; returns the number of bytes, 0 at the end."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    os.lseek(fd, offset, os.SEEK_SET)
    read = os.read(fd, view.nbytes)
    view[: len(read)] = read
    return len(read)


def sync_folder(path: Path) -> None:
    """Make removals in ``path`` survive a power failure, if the system can."""
    with suppress(OSError), OpenFile(path, os.O_RDONLY) as folder:  # Windows opens no folders
        os.fsync(folder.fd)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError for other text, and for JSON nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Write or atomically replace a file (mode 0600), with its missing folders."""
    make_folder(path.parent)
    temp = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}")
    try:
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents for this user alone (mode 0700).

    Not ``mkdir(parents=True)``, which gives parents the mode of the umask.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
