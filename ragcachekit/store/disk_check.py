"""Verification and repair of a disk tier's folder, which other processes may use meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ragcachekit.errors import StoreError
from ragcachekit.store.base import Counters
from ragcachekit.store.disk_files import (
    SECONDS_TO_LOCK,
    SECONDS_TO_OPEN,
    EntryFiles,
    FolderLock,
    LockFailed,
    claim_folder,
    entry_files,
    orphans,
)
from ragcachekit.store.entry import EntryDamaged, EntryFile, entry_name, open_file

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and all bytes to read."""

_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class BadEntry:
    """An entry file that no read would return."""

    name: str
    reason: str


@dataclass(frozen=True)
class Verified:
    """Result of reading all ``entries`` files, of ``nbytes`` together.

    ``damaged`` includes files of other versions of this library; ``unreadable`` ones could not be read now.
    ``orphans`` are temporary files of dead writers; 0 where the folder cannot be locked.
    """

    entries: int
    nbytes: int
    damaged: tuple[BadEntry, ...]
    unreadable: tuple[BadEntry, ...]
    orphans: int


@dataclass(frozen=True)
class Repaired:
    """What :func:`repair` removed, and the remaining entries."""

    damaged: tuple[BadEntry, ...]
    orphans: int
    entries: int
    nbytes: int


def is_disk_tier(folder: Path) -> bool:
    """Whether a folder holds entries of a disk tier."""
    return folder.is_dir() and bool(entry_files(folder))


def verify(folder: Path, progress: Progress | None = None) -> Verified:
    """Read every entry whole; changes nothing. OSError if the folder cannot be listed."""
    files = entry_files(folder)
    total, done = sum(files.values()), 0
    damaged, unreadable, gone = [], [], 0
    for name, nbytes in files.items():
        try:
            _read(folder / name)
        except EntryDamaged as error:
            damaged.append(BadEntry(name, str(error)))
        except FileNotFoundError:  # another process evicted it just now
            gone += 1
        except OSError as error:
            unreadable.append(BadEntry(name, str(error)))
        done += nbytes
        if progress is not None:
            progress(done, total)
    return Verified(len(files) - gone, total, tuple(damaged), tuple(unreadable), _orphans(folder))


def repair(folder: Path, progress: Progress | None = None) -> Repaired:
    """Drop damaged entries and orphans; StoreError if the folder cannot be used."""
    claim_folder(folder)
    try:
        found = verify(folder, progress)
        files = EntryFiles(folder, _UNLIMITED, {}, Counters("disk"))
        dropped = tuple(bad for bad in found.damaged if files.remove(bad.name))
        files.wait_for_writers(SECONDS_TO_OPEN)
        entries, nbytes = files.content()
    except (OSError, LockFailed) as error:
        raise StoreError(f"cannot repair the cache folder {folder}: {error}") from error
    return Repaired(dropped, found.orphans, entries, nbytes)


def _orphans(folder: Path) -> int:
    with suppress(LockFailed), FolderLock(folder / "lock").held(SECONDS_TO_LOCK):
        return len(list(orphans(folder)))
    return 0


def _read(path: Path) -> None:
    with open_file(path) as file:
        entry = EntryFile(file)
        if entry_name(entry.header.key) != path.name:
            raise EntryDamaged("holds the entry of another key")
        for number in range(len(entry.header.layers)):
            entry.layer(number)
