"""``ragcachekit cache``: stats, verify, repair and clear of a folder's disk tiers and vector indexes."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.filesize import decimal as size
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from ragcachekit.commands.console import errors, show
from ragcachekit.commands.manifest import manifests
from ragcachekit.commands.workspace import CacheFolder
from ragcachekit.errors import RagCacheError

if TYPE_CHECKING:
    from ragcachekit.store.disk import BadEntry

DAMAGED = "(damaged)"

# Manifest, data, and temporary files of either.
_INDEX_NAME = re.compile(r"(\.)?minilm-[0-9a-f]{16}\.index(?(1)\.\w+\.tmp|(\.[0-9a-f]{16}\.data)?)")

ContentDir = Annotated[
    str | None,
    typer.Option(
        help="Cache folder of `ask` and `precompute`, or disk_path of a StoreConfig; default: the user's own."
    ),
]


def stats(cache: ContentDir = None) -> None:
    """Entries and bytes by namespace."""
    content = _content(cache)
    for tier in content.tiers:
        usage = tier.usage()
        table = Table()
        for name in ("namespace", "entries", "bytes"):
            table.add_column(name, justify="left" if name == "namespace" else "right")
        for use in usage:
            table.add_row(escape(use.namespace), str(use.entries), size(use.nbytes))
        table.add_row("all", str(sum(u.entries for u in usage)), size(sum(u.nbytes for u in usage)))
        typer.echo(f"{tier.name}:")  # a title would be folded to the table's width
        show(table)
    typer.echo(f"vector indexes: {size(content.index_bytes())}")


def verify(cache: ContentDir = None) -> None:
    """Read every entry and list the damaged ones; changes nothing. Ends with 1 if there are any."""
    from ragcachekit.store import disk

    bad = repairable = False
    for tier in _content(cache).tiers:
        with _reading() as progress:
            found = disk.verify(tier.path, progress)
        _list("damaged", found.damaged)
        _list("unreadable", found.unreadable)
        damaged = len(found.damaged)
        typer.echo(f"{tier.name}: {found.entries} entries, {size(found.nbytes)}: {damaged or 'none'} damaged")
        if found.orphans:
            typer.echo(f"{found.orphans} files of interrupted writes")
        repairable |= bool(damaged or found.orphans)
        bad |= bool(damaged or found.unreadable)
    if repairable:
        typer.echo("`ragcachekit cache repair` drops them")
    if bad:
        raise typer.Exit(1)


def repair(cache: ContentDir = None) -> None:
    """Drop damaged entries and what interrupted writes left."""
    from ragcachekit.store import disk

    for tier in _content(cache).tiers:
        with _reading() as progress:
            done = disk.repair(tier.path, progress)
        _list("dropped", done.damaged)
        typer.echo(
            f"{tier.name}: dropped {len(done.damaged)} damaged entries and {done.orphans} files of "
            f"interrupted writes; {done.entries} entries, {size(done.nbytes)} are left"
        )


def clear(
    cache: ContentDir = None,
    namespace: Annotated[str | None, typer.Option(help="Only this one.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete KV and vector indexes (the KV of one namespace only, if one is named)."""
    content = _content(cache)
    what = "all KV and vector indexes" if namespace is None else f"the KV of namespace {namespace!r}"
    if not yes:
        typer.confirm(f"Delete {what} in {content.folder.path}?", abort=True)
    for tier, dropped in zip(content.tiers, content.clear(namespace), strict=True):
        typer.echo(f"{tier.name}: deleted {dropped} entries")


class Usage(NamedTuple):
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
        from ragcachekit.prefix_tree.disk import FORGETS

        return (self.path / FORGETS).is_dir()

    @property
    def name(self) -> str:
        """Content and folder, for people."""
        return f"{'Knowledge tree' if self.is_tree else 'Chunk KV'} in {self.path}"

    def usage(self) -> tuple[Usage, ...]:
        """Entries by namespace, read from their headers."""
        from ragcachekit.store.disk_folder import entry_files
        from ragcachekit.store.entry import EntryDamaged, read_key

        sizes = defaultdict[str, list[int]](list)
        for name, nbytes in entry_files(self.path).items():
            path = self.path / name
            try:
                sizes[read_key(path).namespace].append(nbytes)
            except FileNotFoundError:  # evicted just now
                continue
            except EntryDamaged:
                sizes[DAMAGED].append(nbytes)
            except OSError as error:
                raise _unreadable(path, error) from error
        return tuple(Usage(name, len(sizes[name]), sum(sizes[name])) for name in sorted(sizes))

    def forget(self, namespaces: Collection[str]) -> int:
        """Delete the entries of these namespaces and all damaged ones; returns their number."""
        from ragcachekit.prefix_tree.disk import Dropped, TreeDisk
        from ragcachekit.store.disk import DiskStore

        store = DiskStore(self.path, sys.maxsize)  # any smaller budget would evict on opening
        # A tree informs processes that hold some of it in memory.
        nothing = Dropped([], 0, None)
        target: TreeDisk | DiskStore = TreeDisk(store, RLock(), lambda *_: nothing) if self.is_tree else store
        try:
            return sum(target.forget(namespace, None) for namespace in namespaces)
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
            return cls(folder, (*_tiers(folder.path), *_tiers(folder.kv)))
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


def _content(cache: str | None) -> CacheContent:
    content = CacheContent.at(cache)
    if not content.tiers:
        typer.echo(f"no chunk KV in {content.folder.path}")
    return content


@contextmanager
def _reading() -> Iterator[Callable[[int, int], None]]:
    with Progress(console=errors(), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _list(what: str, found: Sequence[BadEntry]) -> None:
    for bad in found:
        typer.echo(f"{what}: {bad.name}: {bad.reason}")


def _unreadable(path: Path, error: OSError) -> RagCacheError:
    return RagCacheError(f"cannot read {path}: {error.strerror}; choose another --cache")


def _tiers(place: Path) -> Iterator[Tier]:
    from ragcachekit.prefix_tree.disk import FOLDER
    from ragcachekit.store.disk import is_disk_tier

    if is_disk_tier(place):
        yield Tier(place)
    tree = Tier(place / FOLDER)
    if tree.is_tree and is_disk_tier(tree.path):
        yield tree


def _indexes(folder: CacheFolder) -> list[Path]:
    files = folder.indexes.glob("*")
    return [path for path in files if _INDEX_NAME.fullmatch(path.name) and path.is_file()]
