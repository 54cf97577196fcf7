"""Makes calls that write to a medium fail: the n-th one, or all from the n-th on."""

from __future__ import annotations

import io
import os
import sqlite3
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_SQLITE = {"ENOSPC": sqlite3.SQLITE_FULL, "EDQUOT": sqlite3.SQLITE_FULL, "EROFS": sqlite3.SQLITE_READONLY}


class Faults:
    """Counts calls that write below a folder, and fails those that ``fails`` picks by their number.

    Attributes
    ----------
    calls : list of str
        The names of all calls so far, in order.
    """

    def __init__(self, root: os.PathLike[str], code: int, fails: Callable[[int], bool]) -> None:
        self._root, self._code, self._fails = os.fspath(root), code, fails
        self.calls: list[str] = []

    def concerns(self, target: Any) -> bool:
        """Whether a path, or what a descriptor is open on, lies below the folder."""
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        return isinstance(target, str | os.PathLike) and os.fspath(target).startswith(self._root)

    def strike(self, name: str, target: Any) -> None:
        """Count a call; OSError if it is to fail."""
        if self.concerns(target):
            self.calls.append(name)
            if self._fails(len(self.calls)):
                raise OSError(self._code, os.strerror(self._code), str(target))

    def sqlite(self) -> None:
        """Count a statement; sqlite3.OperationalError if it is to fail."""
        self.calls.append("sqlite")
        if self._fails(len(self.calls)):
            error = sqlite3.OperationalError(os.strerror(self._code))
            name = {28: "ENOSPC", 122: "EDQUOT", 30: "EROFS"}.get(self._code, "")
            error.sqlite_errorcode = _SQLITE.get(name, sqlite3.SQLITE_IOERR)
            raise error


class _Connection(sqlite3.Connection):
    faults: Faults

    def execute(self, *args: Any) -> sqlite3.Cursor:
        if self.faults is not None:
            self.faults.sqlite()
        return super().execute(*args)


@contextmanager
def injected(faults: Faults) -> Any:
    """While inside, calls go by ``faults`` first."""
    real_open, real_io, real_connect = os.open, io.open, sqlite3.connect

    def failing(name: str) -> Any:
        real = getattr(os, name)

        def call(target: Any, *args: Any, **options: Any) -> Any:
            faults.strike(name, target)
            return real(target, *args, **options)

        return patch.object(os, name, call)

    def opening(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & _WRITES:
            faults.strike("open", path)
        return real_open(path, flags, *args, **options)

    def opening_file(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if set(mode) & set("wax+") and not isinstance(path, int):
            faults.strike("open", path)
        return real_io(path, mode, *args, **options)

    def connecting(path: Any, **options: Any) -> sqlite3.Connection:
        connection = real_connect(path, factory=_Connection, **options)
        connection.faults = faults if faults.concerns(path) else None
        return connection

    names = ("mkdir", "write", "fsync", "replace", "rename", "unlink", "ftruncate")
    patches = [failing(name) for name in names]
    patches += [patch.object(os, "open", opening), patch.object(io, "open", opening_file)]
    patches.append(patch.object(sqlite3, "connect", connecting))
    for one in patches:
        one.start()
    try:
        yield faults
    finally:
        for one in reversed(patches):
            one.stop()
