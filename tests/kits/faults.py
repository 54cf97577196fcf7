"""A file system whose calls fail, are cut short or are watched: the n-th one, or all from the n-th on."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
WRITING = ("mkdir", "write", "fsync", "replace", "rename", "unlink", "utime", "ftruncate")
READING = ("preadv", "pread", "scandir")


class Faults:
    """Counts the calls below ``root``, before each happens, and fails those that ``fails`` picks by number.

    ``fails`` gets the number of a call, from 1 on; its name is the last of ``calls``. It may also do
    something in the middle of an operation, and return False. With ``cut``, writes and reads are cut to half
    their length, once in a row, instead of failing with the error number ``code``.
    """

    def __init__(
        self, root: os.PathLike[str], code: int, fails: Callable[[int], Any], *, cut: bool = False
    ) -> None:
        self._root, self._code, self._fails, self.cut = os.fspath(root), code, fails, cut
        self.calls: list[str] = []

    def concerns(self, target: Any) -> bool:
        """Whether a path, or what a descriptor is open on, lies below the folder."""
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        return isinstance(target, str | os.PathLike) and os.fspath(target).startswith(self._root)

    def strike(self, name: str, target: Any) -> bool:
        """Count a call; OSError if it is to fail, True if it is to be cut short."""
        if self.concerns(target):
            self.calls.append(name)
            if self._fails(len(self.calls)):
                if self.cut:
                    return True
                raise OSError(self._code, os.strerror(self._code), str(target))
        return False


@contextmanager
def injected(faults: Faults, *, reads: bool = False) -> Iterator[Faults]:
    """While inside, calls that write (with ``reads`` also those that read) go by ``faults`` first."""
    real_open, real_io = os.open, io.open

    def failing(name: str) -> Any:
        real = getattr(os, name)

        def call(target: Any, *args: Any, **options: Any) -> Any:
            if faults.strike(name, target):
                args = (_half(args[0]), *args[1:])
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

    patches = [failing(name) for name in (*WRITING, *(READING if reads else ())) if hasattr(os, name)]
    patches += [patch.object(os, "open", opening), patch.object(io, "open", opening_file)]
    for one in patches:
        one.start()
    try:
        yield faults
    finally:
        for one in reversed(patches):
            one.stop()


def _half(data: Any) -> Any:
    """The first half of what is to be written, or of the one buffer to be read into."""
    if isinstance(data, list):
        return [memoryview(data[0])[: max(1, len(data[0]) // 2)]]
    return memoryview(data)[: max(1, len(data) // 2)]
