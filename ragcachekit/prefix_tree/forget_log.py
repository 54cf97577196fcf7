"""Log of forgets in a folder shared by several processes, so that none writes forgotten entries again."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ragcachekit.errors import StoreError
from ragcachekit.files import NO_FOLLOW, make_folder, open_regular, parse_json, read_regular
from ragcachekit.store.disk.folder import FolderBusy, FolderLock, LockFailed
from ragcachekit.store.disk.volume import takes_no_writes

_SECONDS_TO_WRITE = 5.0
"""Longest wait of a writer for another process; then it writes nothing."""

_SECONDS_TO_FORGET = 60.0
"""Longest wait of a ``forget`` for a writer; then it continues, and raises StoreError at the end."""

_LOG = logging.getLogger(__name__)
_MOST = 1 << 20
"""Bytes of a file at which it is started anew; other processes then forget the whole namespace."""

Ids = frozenset[str] | None
"""Forgotten segment ids, or None for the whole namespace."""


@dataclass(frozen=True)
class _Position:
    """How far a file was read."""

    state: tuple[int, ...]  # inode, size and time
    name: bytes = b""  # the first line
    offset: int = 0  # of the next line


class ForgetLog:
    """One file per namespace: a random name, then a line per ``forget``. Not thread safe.

    ``forget`` holds the folder's lock while it deletes and appends its line, a writer while it reads new
    lines and writes: in either order, forgotten entries are gone afterwards. StoreError if ``folder`` cannot
    be made.
    """

    def __init__(self, folder: Path, most: int = _MOST) -> None:
        self._folder, self._most = folder, most
        try:
            make_folder(folder)
        except OSError as error:
            if not takes_no_writes(error):
                raise StoreError(f"cannot make the folder {folder}: {error}") from error
            _LOG.warning("the tree is not written to the disk for now: %s", error)
        self._lock = FolderLock(folder / "lock")
        self._token = secrets.token_hex(8)
        self._positions: dict[str, _Position] = {}

    def unread(self, namespace: str) -> list[Ids]:
        """What others have forgotten since the last call; nothing the first time. Costs one ``stat``.

        A file that became unreadable, or was started anew, counts as the whole namespace.
        """
        known, state = self._positions.get(namespace), self._state(namespace)
        if known is not None and known.state == state:
            return []
        content = self._content(namespace)
        name, end = content[: content.find(b"\n") + 1], content.rfind(b"\n") + 1
        self._positions[namespace] = _Position(state, name, end)
        if known is None:
            return []
        if known.name and known.name != name:
            return [None]
        entries = content[known.offset or len(name) : end].splitlines()
        return [ids for by, ids in map(_parsed, entries) if by != self._me]

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Exclude other writers and forgets; False if that fails, and nothing must be written."""
        with ExitStack() as held:
            try:
                held.enter_context(self._lock.held(_SECONDS_TO_WRITE))
                may_write = True
            except LockFailed as error:
                _LOG.warning("the tree is not written to the disk: %s", error)
                may_write = False
            yield may_write

    @contextmanager
    def forgetting(self, namespace: str, ids: Ids) -> Iterator[None]:
        """Exclude writers, and append a line at the end. A failing medium is only logged.

        The line comes last, as others may still read entries while they are being deleted. StoreError, after
        all else, if the wait for a writer timed out: it may write forgotten entries again.
        """
        late: FolderBusy | None = None
        with ExitStack() as held:
            try:
                held.enter_context(self._lock.held(_SECONDS_TO_FORGET))
            except FolderBusy as error:
                late = error
            except LockFailed as error:
                _LOG.warning("other processes do not wait while something is forgotten: %s", error)
            try:
                yield
            finally:
                try:
                    self._append(namespace, _line(self._me, ids))
                except OSError as error:
                    _LOG.warning("other processes are not told what was forgotten: %s", error)
        if late is not None:
            raise StoreError(
                "another process has been writing to the tree's folder all the time and may write what was "
                f"forgotten; forget again when it goes on or has ended: {late}"
            ) from late

    @property
    def _me(self) -> str:
        return f"{self._token}-{os.getpid()}"  # a forked child is another process

    def _append(self, namespace: str, line: bytes) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | NO_FOLLOW
        with open_regular(self._path(namespace), flags) as file:
            fd, size = file.fd, os.fstat(file.fd).st_size
            if size and (size + len(line) > self._most or not _is_whole(fd, size)):
                os.ftruncate(fd, 0)
                size, line = 0, _line("", None)
            if not size:
                line = secrets.token_hex(16).encode() + b"\n" + line
            os.write(fd, line)
            os.fsync(fd)

    def _path(self, namespace: str) -> Path:
        return self._folder / blake2b(namespace.encode(), digest_size=16).hexdigest()

    def _state(self, namespace: str) -> tuple[int, ...]:
        try:
            status = os.stat(self._path(namespace))
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _content(self, namespace: str) -> bytes:
        try:
            return read_regular(self._path(namespace))
        except OSError:
            return b""


def _is_whole(fd: int, size: int) -> bool:
    os.lseek(fd, size - 1, os.SEEK_SET)
    return os.read(fd, 1) == b"\n"


def _line(by: str, ids: Ids) -> bytes:
    return json.dumps({"by": by, "ids": None if ids is None else sorted(ids)}).encode() + b"\n"


def _parsed(line: bytes) -> tuple[str, Ids]:
    """Process and ids of a line; an unreadable line counts as the whole namespace."""
    try:
        entry = parse_json(line)
        ids = entry["ids"]
        return str(entry["by"]), None if ids is None else frozenset(map(str, ids))
    except (ValueError, KeyError, TypeError):
        return "", None
