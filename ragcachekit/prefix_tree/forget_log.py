"""Log of forgets in a folder shared by several processes, so that none writes forgotten entries again."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path

from ragcachekit.errors import StoreError
from ragcachekit.files import NO_FOLLOW, open_regular, parse_json, read_regular
from ragcachekit.store.disk.folder import FolderBusy, FolderLock, IndexFailed

_SECONDS_TO_WRITE = 5.0
"""Longest wait of a writer for another process; then it writes nothing."""

_SECONDS_TO_FORGET = 60.0
"""Longest wait of a ``forget`` for a writer; then it continues, and raises StoreError at the end."""

_LOG = logging.getLogger(__name__)

Ids = frozenset[str] | None
"""Forgotten segment ids, or None for the whole namespace."""


class ForgetLog:
    """One file per namespace with a line per ``forget``. Not thread safe.

    ``forget`` holds the folder's lock while it deletes and appends its line, a writer while it reads new
    lines and writes: in either order, forgotten entries are gone afterwards.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FolderLock(folder / "lock")
        self._me = secrets.token_hex(8)
        self._known: dict[str, tuple[int, int]] = {}  # size and time of a file when it was read

    def unread(self, namespace: str) -> list[Ids]:
        """What others have forgotten since the last call; nothing the first time. Costs one ``stat``.

        A file that became unreadable, or lost lines, counts as the whole namespace.
        """
        state = self._state(namespace)
        known = self._known.get(namespace, state)
        self._known[namespace] = state
        if known == state:
            return []
        lines = self._content(namespace)[known[0] : state[0]].splitlines()
        return [ids for by, ids in map(_parsed, lines) if by != self._me] if lines else [None]

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Exclude other writers and forgets; False if that fails, and nothing must be written."""
        with ExitStack() as held:
            try:
                held.enter_context(self._lock.held(_SECONDS_TO_WRITE))
                may_write = True
            except IndexFailed as error:
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
            except IndexFailed as error:
                _LOG.warning("other processes do not wait while something is forgotten: %s", error)
            try:
                yield
            finally:
                try:
                    self._append(namespace, ids)
                except OSError as error:
                    _LOG.warning("other processes are not told what was forgotten: %s", error)
        if late is not None:
            raise StoreError(
                "another process has been writing to the tree's folder all the time and may write what was "
                f"forgotten; forget again when it goes on or has ended: {late}"
            ) from late

    def _append(self, namespace: str, ids: Ids) -> None:
        entry = {"by": self._me, "ids": None if ids is None else sorted(ids)}
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW
        with open_regular(self._path(namespace), flags) as file:
            os.write(file.fd, json.dumps(entry).encode() + b"\n")
            os.fsync(file.fd)

    def _path(self, namespace: str) -> Path:
        return self._folder / blake2b(namespace.encode(), digest_size=16).hexdigest()

    def _state(self, namespace: str) -> tuple[int, int]:
        try:
            status = os.stat(self._path(namespace))
        except OSError:
            return 0, 0
        return status.st_size, status.st_mtime_ns

    def _content(self, namespace: str) -> bytes:
        try:
            return read_regular(self._path(namespace))
        except OSError:
            return b""


def _parsed(line: bytes) -> tuple[str, Ids]:
    """Process and ids of a line; an unreadable line counts as the whole namespace."""
    try:
        entry = parse_json(line)
        ids = entry["ids"]
        return str(entry["by"]), None if ids is None else frozenset(map(str, ids))
    except (ValueError, KeyError, TypeError):
        return "", None
