"""What was forgotten in a folder that several processes share, so that none of them brings it back."""

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
from ragcachekit.store.disk.folder import FolderBusy, FolderLock, IndexFailed
from ragcachekit.store.disk.volume import takes_no_writes

_SECONDS_TO_WRITE = 5.0
"""A writer waits so long for a forgetter, which may be stopped; then it leaves it."""

_SECONDS_TO_FORGET = 60.0
"""A forgetter waits so long for a writer, which may be stopped; then it goes on, and says so."""

_LOG = logging.getLogger(__name__)
_MOST = 1 << 20
"""Bytes of one namespace's file; then it begins anew, and others forget the whole namespace."""

Ids = frozenset[str] | None
"""What ``forget`` was told: segment ids, or None for the whole namespace."""


@dataclass(frozen=True)
class _Place:
    """How far a file was read: its inode, size and time, its first line, and where the next line begins."""

    looks: tuple[int, ...]
    name: bytes = b""
    offset: int = 0


class ForgetLog:
    """One file per namespace: a name of its own, then a line per ``forget``.

    A forgetter holds the folder's lock while it deletes and writes its line, a writer while it looks for
    news and writes: whichever comes first, what was forgotten is not there afterwards. Not thread safe;
    looking for news costs one ``stat``.

    ``most`` is the size of one file in bytes. StoreError if ``folder`` cannot be made.
    """

    def __init__(self, folder: Path, most: int = _MOST) -> None:
        self._folder, self._most = folder, most
        try:
            make_folder(folder)
        except OSError as error:
            if not takes_no_writes(error):
                raise StoreError(f"cannot make the folder {folder}: {error}") from error
            _LOG.warning("nothing of the tree is written to the disk for now: %s", error)
        self._lock = FolderLock(folder / "lock")
        self._token = secrets.token_hex(8)
        self._places: dict[str, _Place] = {}

    def news(self, namespace: str) -> list[Ids]:
        """What others have forgotten since the last call; nothing the first time.

        A file that cannot be read any more, or begins anew, counts as the whole namespace.
        """
        known, looks = self._places.get(namespace), self._looks(namespace)
        if known is not None and known.looks == looks:
            return []
        content = self._content(namespace)
        name, end = content[: content.find(b"\n") + 1], content.rfind(b"\n") + 1
        self._places[namespace] = _Place(looks, name, end)
        if known is None:
            return []
        if known.name and known.name != name:
            return [None]
        entries = content[known.offset or len(name) : end].splitlines()
        return [ids for by, ids in map(_parsed, entries) if by != self._me]

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Keep others from forgetting or writing; False if that fails, and nothing must be written."""
        with ExitStack() as held:
            try:
                held.enter_context(self._lock.held(_SECONDS_TO_WRITE))
                may_write = True
            except IndexFailed as error:
                _LOG.warning("nothing of the tree is written to the disk: %s", error)
                may_write = False
            yield may_write

    @contextmanager
    def forgetting(self, namespace: str, ids: Ids) -> Iterator[None]:
        """Keep others from writing, and note for them what was forgotten. A failing medium is only logged.

        The note comes last, as what others still find while it is being deleted has to go as well.

        Raises
        ------
        StoreError
            Once everything else is done, if a writer could not be waited for: it may bring something back.
        """
        late: FolderBusy | None = None
        with ExitStack() as held:
            try:
                held.enter_context(self._lock.held(_SECONDS_TO_FORGET))
            except FolderBusy as error:
                late = error
            except IndexFailed as error:
                _LOG.warning("other processes do not wait while something is forgotten: %s", error)
            try:
                yield
            finally:
                self._note(namespace, ids)
        if late is not None:
            raise StoreError(
                "another process has been writing to the tree's folder all the time and may write what was "
                f"forgotten; forget again when it goes on or has ended: {late}"
            ) from late

    @property
    def _me(self) -> str:
        return f"{self._token}-{os.getpid()}"  # a forked child is somebody else

    def _note(self, namespace: str, ids: Ids) -> None:
        try:
            self._append(namespace, _line(self._me, ids))
        except OSError as error:
            _LOG.warning("other processes do not hear what was forgotten: %s", error)

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

    def _looks(self, namespace: str) -> tuple[int, ...]:
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
    """Who forgot, and what; a line that cannot be read stands for everything."""
    try:
        entry = parse_json(line)
        ids = entry["ids"]
        return str(entry["by"]), None if ids is None else frozenset(map(str, ids))
    except (ValueError, KeyError, TypeError):
        return "", None
