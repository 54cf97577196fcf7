"""``ragcachekit cache``: stats and clear of a folder's disk tiers and vector indexes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal as size
from rich.markup import escape
from rich.table import Table

from ragcachekit.commands.console import show
from ragcachekit.commands.workspace import CacheFolder
from ragcachekit.errors import RagCacheError

DAMAGED = "(damaged)"

_INDEXES = tuple(f"minilm-*/{name}" for name in ("lock", "index-*", ".index-*", "documents/cache.db*"))
"""Lock, vectors, what a killed writer left of them, and documents."""

ContentDir = Annotated[
    str | None,
    typer.Option(
        help="Cache folder of `ask` and `precompute`, or disk_path of a StoreConfig; default: the user's own."
    ),
]


def stats(cache: ContentDir = None) -> None:
    """Entries and bytes by namespace."""
    folder, tiers = _content(cache)
    for tier in tiers:
        table = Table()
        for name in ("namespace", "entries", "bytes"):
            table.add_column(name, justify="left" if name == "namespace" else "right")
        sizes = usage(tier)
        for namespace, nbytes in sizes.items():
            table.add_row(escape(namespace), str(len(nbytes)), size(sum(nbytes)))
        table.add_row("all", str(sum(map(len, sizes.values()))), size(sum(map(sum, sizes.values()))))
        typer.echo(f"{_name(tier)}:")  # a title would be folded to the table's width
        show(table)
    typer.echo(f"vector indexes: {size(sum(path.stat().st_size for path in _indexes(folder)))}")


def clear(
    cache: ContentDir = None,
    namespace: Annotated[str | None, typer.Option(help="Only this one.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete KV and vector indexes (the KV of one namespace only, if one is named).

    Files with names of other programs stay.
    """
    folder, tiers = _content(cache)
    what = "all KV and vector indexes" if namespace is None else f"the KV of namespace {namespace!r}"
    if not yes:
        typer.confirm(f"Delete {what} in {folder.path}?", abort=True)
    namespaces = {name for tier in tiers for name in usage(tier)} if namespace is None else {namespace}
    for tier in tiers:
        typer.echo(f"{_name(tier)}: deleted {_forget(tier, namespaces)} entries")
    for path in _indexes(folder) if namespace is None else ():
        path.unlink(missing_ok=True)


def usage(tier: Path) -> dict[str, list[int]]:
    """Sizes of the entries in a tier's folder by namespace, read from their headers."""
    from ragcachekit.store.disk_folder import entry_files
    from ragcachekit.store.entry import EntryDamaged, read_key

    sizes = defaultdict[str, list[int]](list)
    for name, nbytes in entry_files(tier).items():
        try:
            sizes[read_key(tier / name).namespace].append(nbytes)
        except FileNotFoundError:  # evicted just now
            continue
        except EntryDamaged:
            sizes[DAMAGED].append(nbytes)
        except OSError as error:
            raise _unreadable(tier / name, error) from error
    return dict(sorted(sizes.items()))


def tiers_in(folder: CacheFolder) -> list[Path]:
    """Folders of disk tiers: each chunk store, followed by the tree in its folder."""
    from ragcachekit.prefix_tree.disk import FOLDER
    from ragcachekit.store.disk_folder import entry_files

    try:
        return [
            place
            for at in (folder.path, folder.kv)
            for place in (at, at / FOLDER)
            if place.is_dir() and entry_files(place)
        ]
    except OSError as error:
        raise _unreadable(folder.path, error) from error


def _content(cache: str | None) -> tuple[CacheFolder, list[Path]]:
    """The folder named, or the user's own, and its tiers; RagCacheError if the folder named is none."""
    folder = CacheFolder.at(cache)
    if cache is not None and not folder.path.is_dir():
        what = "is a file" if folder.path.exists() else "does not exist"
        raise RagCacheError(
            f"the folder {folder.path} {what}; give the --cache of `ask` and `precompute`, "
            "or the disk_path of a StoreConfig"
        )
    tiers = tiers_in(folder)
    if not tiers:
        typer.echo(f"no chunk KV in {folder.path}")
    return folder, tiers


def _forget(tier: Path, namespaces: Collection[str]) -> int:
    """Delete the entries of these namespaces, damaged ones if DAMAGED is among them; returns their number."""
    from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
    from ragcachekit.store.disk import DiskStore
    from ragcachekit.store.disk_folder import entry_files

    store = DiskStore(tier, sys.maxsize)  # any smaller budget would evict on opening
    # A tree informs processes that hold some of it in memory.
    with closing(KnowledgeTree(disk=store) if _is_tree(tier) else store) as content:
        gone = sum(content.forget(namespace) for namespace in namespaces)
    for name in entry_files(tier) if DAMAGED in namespaces else ():  # what is left cannot be read
        (tier / name).unlink(missing_ok=True)
        gone += 1
    return gone


def _is_tree(tier: Path) -> bool:
    from ragcachekit.prefix_tree.disk import FOLDER

    return tier.name == FOLDER


def _name(tier: Path) -> str:
    return f"{'Knowledge tree' if _is_tree(tier) else 'Chunk KV'} in {tier}"


def _unreadable(path: Path, error: OSError) -> RagCacheError:
    return RagCacheError(f"cannot read {path}: {error.strerror}; choose another --cache")


def _indexes(folder: CacheFolder) -> list[Path]:
    return [path for name in _INDEXES for path in folder.indexes.glob(name) if path.is_file()]
