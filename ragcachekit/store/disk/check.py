"""Looking through the folder of a disk tier, and mending it. Other processes may be at work in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ragcachekit.errors import StoreError
from ragcachekit.store.counters import Counters
from ragcachekit.store.disk.entry_files import SECONDS_TO_OPEN, EntryFiles, entry_files
from ragcachekit.store.disk.folder import FolderBusy, FolderLock, IndexFailed, claim_folder, orphans
from ragcachekit.store.disk.index import SECONDS_TO_LOCK, is_index
from ragcachekit.store.entry.file import EntryReader, entry_name
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.store.entry.image import nowhere

Progress = Callable[[int, int], None]
"""Called with how many bytes of how many have been read."""

_UNLIMITED = 1 << 62  # no entry leaves a folder because it is looked through


@dataclass(frozen=True)
class BadEntry:
    """An entry file that no read would return: its name, what is wrong, and which file that was."""

    name: str
    reason: str
    seen: os.stat_result | None


@dataclass(frozen=True)
class Verified:
    """What reading every entry whole has shown: ``entries`` files of ``nbytes`` together.

    ``damaged`` ones are altered, cut short, under another's name, or of another version of this library;
    ``unreadable`` ones could not be read now. ``orphans`` are temporary files whose writer is gone.
    """

    entries: int
    nbytes: int
    damaged: tuple[BadEntry, ...]
    unreadable: tuple[BadEntry, ...]
    orphans: int


@dataclass(frozen=True)
class Repaired:
    """What :func:`repair` removed, and what is left."""

    damaged: tuple[BadEntry, ...]
    orphans: int
    entries: int
    nbytes: int


def is_disk_tier(folder: Path) -> bool:
    """Whether a disk tier keeps its entries here: there are some, or an index over none."""
    if not folder.is_dir():
        return False
    return is_index(folder / "index" / "cache.db") or bool(entry_files(folder))


def verify(folder: Path, progress: Progress | None = None) -> Verified:
    """Read every entry whole; changes nothing.

    Raises
    ------
    OSError
        If the folder cannot be listed.
    """
    files = entry_files(folder)
    total, done = sum(files.values()), 0
    damaged, unreadable, gone = [], [], 0
    for digest, nbytes in files.items():
        try:
            _read(folder / entry_name(digest))
        except EntryDamaged as error:
            damaged.append(BadEntry(digest, str(error), error.seen))
        except FileNotFoundError:  # another process evicted it just now
            gone += 1
        except OSError as error:
            unreadable.append(BadEntry(digest, str(error), None))
        done += nbytes
        if progress is not None:
            progress(done, total)
    return Verified(len(files) - gone, total, tuple(damaged), tuple(unreadable), _orphans(folder))


def repair(folder: Path, progress: Progress | None = None) -> Repaired:
    """Drop the entries that :func:`verify` finds damaged, sweep orphans, rebuild the index from the files.

    Raises
    ------
    StoreError
        If the folder cannot be used.
    """
    claim_folder(folder)
    try:
        found = verify(folder, progress)
        tier_files = EntryFiles(folder, _UNLIMITED, {}, Counters("disk"), nowhere)
        try:
            tier_files.open(SECONDS_TO_OPEN)
            dropped = tuple(bad for bad in found.damaged if tier_files.remove(bad.name, bad.seen))
            tier_files.rebuild(SECONDS_TO_OPEN, anew=True)
            entries, nbytes = tier_files.content()
        finally:
            tier_files.close()
    except (OSError, IndexFailed) as error:
        raise StoreError(f"cannot repair the cache folder {folder}: {error}") from error
    return Repaired(dropped, found.orphans, entries, nbytes)


def _orphans(folder: Path) -> int:
    """Temporary files whose writer is gone; none where somebody keeps writing."""
    try:
        with FolderLock(folder / "lock").held(SECONDS_TO_LOCK):
            return len(list(orphans(folder)))
    except FolderBusy:
        return 0
    except IndexFailed:  # nobody can write here
        return len(list(orphans(folder)))


def _read(path: Path) -> None:
    with EntryReader(path) as reader:
        try:
            if reader.header.key.digest() != path.stem:
                raise EntryDamaged("holds the entry of another key")
            for number in range(reader.header.layout.layers):
                reader.layer(number)
        except EntryDamaged as error:
            error.seen = reader.status
            raise
