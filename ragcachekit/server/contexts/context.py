"""One stored context, and contexts by owner: in memory and, given a folder, in files."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ragcachekit.files import make_folder, parse_json, read_regular, replace_file
from ragcachekit.server.errors import ApiError
from ragcachekit.store.disk_files import claim_folder

log = logging.getLogger(__name__)

PREFIX = "cachedContents/"
LEFTOVER_AGE = 3600.0
"""Seconds after which an unfinished file has no writer any more."""

_LISTS = ("chunks", "chunk_ids")


@dataclass(frozen=True)
class Context:
    """Texts that a client stored under a name, to ask about them later.

    - ``name``: ``cachedContents/`` and 128 random bits as hex.
    - ``namespace``: The tenant's, which the chunks are encoded in.
    - ``system``: Text of the system message; None: none.
    - ``chunks``, ``chunk_ids``: Texts in order, and their ids as ``RagCache.encode`` returns them.
    - ``tokens``: Of all chunks and the system text.
    - ``created``, ``updated``, ``expires``: Unix time in seconds.
    """

    name: str
    namespace: str
    model: str
    display_name: str
    system: str | None
    chunks: tuple[str, ...]
    chunk_ids: tuple[str, ...]
    tokens: int
    created: float
    updated: float
    expires: float

    def texts_of(self, chunk_ids: Iterable[str]) -> tuple[str, ...]:
        """Texts of some of its chunks, in the order given; ApiError 404 for an unknown id."""
        known = dict(zip(self.chunk_ids, self.chunks, strict=True))
        ids = tuple(chunk_ids)
        for chunk_id in ids:
            if chunk_id not in known:
                message = f"There is no chunk {chunk_id!r} in {self.name}."
                raise ApiError(404, message, param="chunk_ids", code="chunk_not_found")
        return tuple(known[chunk_id] for chunk_id in ids)


class ContextFiles:
    """Contexts by owner and name, which must be checked by the caller: both become parts of a path.

    With a folder, each is a JSON file of mode 0600 in a folder of its owner. Other processes may use the
    folder at the same time; what they write and remove is seen. A damaged file is no context, and logged.

    StoreError if the folder belongs to another user or others may write to it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[str, dict[str, tuple[object, Context]]] = {}
        if folder is not None:
            claim_folder(folder)
            folder.chmod(0o700)  # it may have been there before

    def owners(self) -> list[str]:
        """All owners that have, or had, a context."""
        stored = os.listdir(self._folder) if self._folder is not None else []
        return sorted({*stored, *self._known})

    def get(self, owner: str, name: str) -> Context | None:
        """The context of that name, if the owner has it."""
        known = self._known.get(owner, {}).get(name)
        if self._folder is None:
            return known[1] if known else None
        path = self._path(self._folder, owner, name)
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if known is None or known[0] != stamp:
                known = stamp, _context(read_regular(path))
                self._known.setdefault(owner, {})[name] = known
            return known[1]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the cached content %s cannot be read: %r", path, error)
            return None

    def all(self, owner: str) -> list[Context]:
        """The owner's contexts, the oldest first."""
        names = list(self._known.get(owner, ()))
        if self._folder is not None:
            folder = self._folder / owner
            files = os.listdir(folder) if folder.is_dir() else []
            names = [PREFIX + file[:-5] for file in files if file.endswith(".json") and file[0] != "."]
        found = [context for name in names if (context := self.get(owner, name)) is not None]
        return sorted(found, key=lambda context: (context.created, context.name))

    def put(self, owner: str, context: Context) -> None:
        """Store or replace a context; OSError where the disk refuses."""
        if self._folder is not None:
            path = self._path(self._folder, owner, context.name)
            make_folder(path.parent)
            replace_file(path, json.dumps(asdict(context)))
            self.get(owner, context.name)  # here, in the caller's thread, not at its next use
        else:
            self._known.setdefault(owner, {})[context.name] = (None, context)

    def remove(self, owner: str, name: str) -> None:
        """Remove a context; nothing happens if there is none. OSError where the disk refuses."""
        if self._folder is not None:
            self._path(self._folder, owner, name).unlink(missing_ok=True)
        self._known.get(owner, {}).pop(name, None)

    def remove_leftovers(self, owner: str) -> None:
        """Remove what writers left that were killed an hour ago or earlier: it holds texts."""
        if self._folder is not None and (folder := self._folder / owner).is_dir():
            for path in folder.glob(".*"):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < time.time() - LEFTOVER_AGE:
                        path.unlink()

    def vanished(self, owner: str) -> list[Context]:
        """Contexts that this process has used and another one has removed."""
        if self._folder is None:
            return []
        known = list(self._known.get(owner, {}).items())
        return [c for name, (_, c) in known if not os.path.exists(self._path(self._folder, owner, name))]

    @staticmethod
    def _path(folder: Path, owner: str, name: str) -> Path:
        return folder / owner / f"{name.removeprefix(PREFIX)}.json"


def _context(text: bytes) -> Context:
    values = parse_json(text)
    given = {field.name: values[field.name] for field in fields(Context)}
    return Context(**{**given, **{name: tuple(given[name]) for name in _LISTS}})
