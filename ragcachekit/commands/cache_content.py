"""Disk tiers and vector indexes of a cache folder, counted and deleted."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import RLock

from ragcachekit.commands.precompute.manifest import manifests
from ragcachekit.commands.workspace import CacheFolder
from ragcachekit.errors import RagCacheError
from ragcachekit.prefix_tree.disk import FOLDER, FORGETS, Dropped, TreeDisk
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.disk_check import is_disk_tier
from ragcachekit.store.disk_files import entry_files
from ragcachekit.store.entry import EntryDamaged, read_key

DAMAGED = "(damaged)"

# Manifest, data, and temporary files of either.
_INDEX_NAME = re.compile(r"(\.)?minilm-[0-9a-f]{16}\.index(?(1)\.\w+\.tmp|(\.[0-9a-f]{16}\.data)?)")


@dataclass(frozen=True)
class Usage:
    """Entries and bytes of one namespace on disk."""

    namespace: str
    entries: int
    nbytes: int


@dataclass(frozen=True)
class Tier:
    """Folder of a disk tier, of a chunk store or of a knowledge tree."""

    path: Path

    @property
    def is_tree(self) -> bool:
        """Whether it belongs to a knowledge tree."""
        return (self.path / FORGETS).is_dir()

    @property
    def name(self) -> str:
        """Content and folder, for people."""
        return f"{'Knowledge tree' if self.is_tree else 'Chunk KV'} in {self.path}"

    def usage(self) -> tuple[Usage, ...]:
        """Entries by namespace, read from their headers."""
        sizes = defaultdict[str, list[int]](list)
        for name, size in entry_files(self.path).items():
            path = self.path / name
            try:
                sizes[read_key(path).namespace].append(size)
            except FileNotFoundError:  # evicted just now
                continue
            except EntryDamaged:
                sizes[DAMAGED].append(size)
            except OSError as error:
                raise _unreadable(path, error) from error
        return tuple(Usage(name, len(sizes[name]), sum(sizes[name])) for name in sorted(sizes))

    def forget(self, namespaces: Collection[str]) -> int:
        """Delete the entries of these namespaces and all damaged ones; returns their number."""
        store = DiskStore(self.path, sys.maxsize)  # any smaller budget would evict on opening
        # A tree tells processes that hold some of it in memory.
        nothing = Dropped([], 0, None)
        told: TreeDisk | DiskStore = TreeDisk(store, RLock(), lambda *_: nothing) if self.is_tree else store
        try:
            return sum(told.forget(namespace, None) for namespace in namespaces)
        finally:
            store.close()


@dataclass(frozen=True)
class CacheContent:
    """Content of a cache folder: each chunk store, followed by the tree in its folder."""

    folder: CacheFolder
    tiers: tuple[Tier, ...]

    @classmethod
    def at(cls, path: str | os.PathLike[str] | None) -> CacheContent:
        """Content of the folder named, or of the user's own cache folder; RagCacheError without it."""
        folder = CacheFolder.at(path)
        if path is not None and not folder.path.is_dir():
            what = "is a file" if folder.path.exists() else "does not exist"
            raise RagCacheError(
                f"the folder {folder.path} {what}; give the --cache of `ask` and `precompute`, "
                "or the disk_path of a StoreConfig"
            )
        try:
            return cls(folder, tuple(chain(_tiers(folder.path), _tiers(folder.kv))))
        except OSError as error:
            raise _unreadable(folder.path, error) from error

    def index_bytes(self) -> int:
        """Bytes of the vector indexes."""
        return sum(path.stat().st_size for path in _indexes(self.folder))

    def clear(self, namespace: str | None = None) -> tuple[int, ...]:
        """Delete the KV of one namespace, or of all with the indexes; returns entries deleted by tier.

        Files with names of other programs stay.
        """
        stored = (use.namespace for tier in self.tiers for use in tier.usage())
        namespaces = set(stored) if namespace is None else {namespace}
        dropped = tuple(tier.forget(namespaces) for tier in self.tiers)
        for path in _indexes(self.folder) if namespace is None else ():
            path.unlink(missing_ok=True)
        for path in manifests(self.folder.manifests, namespace):
            path.unlink(missing_ok=True)
        return dropped


def _unreadable(path: Path, error: OSError) -> RagCacheError:
    return RagCacheError(f"cannot read {path}: {error.strerror}; choose another --cache")


def _tiers(place: Path) -> Iterator[Tier]:
    if is_disk_tier(place):
        yield Tier(place)
    tree = Tier(place / FOLDER)
    if tree.is_tree and is_disk_tier(tree.path):
        yield tree


def _indexes(folder: CacheFolder) -> list[Path]:
    files = folder.indexes.glob("*")
    return [path for path in files if _INDEX_NAME.fullmatch(path.name) and path.is_file()]
