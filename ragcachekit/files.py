"""Small files and folders of our own: opened without waiting, made for this user alone, read with care."""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NO_WAIT = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)  # a FIFO would wait for its other end


class OpenFile:
    """One open descriptor, closed with its last reference at the latest.

    To open and to keep, and to take and to close, are one call each: a KeyboardInterrupt comes between
    calls, and a descriptor that nothing holds would stay open.

    Parameters
    ----------
    path : path
    flags : int
        As for :func:`os.open`; a FIFO or a device is not waited for.
    mode : int
        Of a file that is created.

    Raises
    ------
    OSError
        As :func:`os.open`.
    """

    _held: Sequence[int] = ()

    def __init__(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> None:
        self._held = held = list[int]()
        held.extend(map(os.open, (path,), (flags | _NO_WAIT,), (mode,)))

    @property
    def fd(self) -> int:
        """The descriptor; -1 once it is closed."""
        return self._held[0] if self._held else -1

    def close(self) -> None:
        """Close it; also twice."""
        if isinstance(self._held, list) and self._held:
            deque(map(os.close, map(list[int].pop, (self._held,))), maxlen=0)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600) -> OpenFile:
    """An :class:`OpenFile` of a regular file; OSError for a folder, FIFO, socket or device of that name."""
    file = OpenFile(path, flags, mode)
    if not stat.S_ISREG(os.fstat(file.fd).st_mode):
        file.close()
        raise OSError(f"{os.fspath(path)} is not a regular file; remove it")
    return file


def read_regular(path: str | os.PathLike[str], *, own: bool = False) -> bytes:
    """All bytes of a regular file; OSError for anything else.

    ``own``: ValueError if it belongs to another user, or others may write to it.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fd)
        if own and (status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise ValueError(f"{os.fspath(path)} belongs to or can be written by others")
        with os.fdopen(os.dup(file.fd), "rb") as reader:
            return reader.read()


def parse_json(text: str | bytes) -> Any:
    """What the JSON says; ValueError for anything that is none, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, all of them for this user alone (mode 0700).

    Not ``mkdir(parents=True)``, which makes parents that everybody may use, as the umask allows.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
