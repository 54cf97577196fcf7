"""Makes calls that write to a medium fail: the n-th one, or all from the n-th on."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


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


@contextmanager
def injected(faults: Faults) -> Any:
    """While inside, calls go by ``faults`` first."""
    real_open, real_io = os.open, io.open

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

    names = ("mkdir", "write", "fsync", "replace", "rename", "unlink", "utime", "ftruncate")
    patches = [failing(name) for name in names]
    patches += [patch.object(os, "open", opening), patch.object(io, "open", opening_file)]
    for one in patches:
        one.start()
    try:
        yield faults
    finally:
        for one in reversed(patches):
            one.stop()
