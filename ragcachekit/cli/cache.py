"""cache stats, verify, repair and clear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ragcachekit.cli.console import errors, put, size
from ragcachekit.cli.options import CacheDir

if TYPE_CHECKING:
    from ragcachekit.store.disk_check import BadEntry


def stats(cache: CacheDir = None) -> None:
    """Entries and bytes by namespace."""
    from ragcachekit.bench.workspace import CacheFolder

    folder = CacheFolder.at(cache)
    usage = folder.usage()
    table = Table(title=f"Chunk KV in {folder.path}", title_justify="left")
    for name in ("namespace", "entries", "bytes"):
        table.add_column(name, justify="left" if name == "namespace" else "right")
    for use in usage:
        table.add_row(escape(use.namespace), str(use.entries), size(use.nbytes))
    table.add_row("all", str(sum(u.entries for u in usage)), size(sum(u.nbytes for u in usage)))
    put(table)
    typer.echo(f"vector indexes: {size(folder.index_bytes())}")


def verify(cache: CacheDir = None) -> None:
    """Read every entry whole and say which are damaged; changes nothing. Ends with 1 if one is."""
    from ragcachekit.bench.workspace import CacheFolder

    folder = CacheFolder.at(cache)
    with _bar("reading") as progress:
        found = folder.verify(progress)
    if found is None:
        typer.echo(f"no chunk KV in {folder.path}")
        return
    _list("damaged", found.damaged)
    _list("unreadable", found.unreadable)
    bad = len(found.damaged)
    typer.echo(f"{found.entries} entries, {size(found.nbytes)}: {bad or 'none'} damaged")
    if found.orphans:
        typer.echo(f"{found.orphans} files of interrupted writes")
    if bad or found.orphans:
        typer.echo("`ragcachekit cache repair` drops them")
    if bad or found.unreadable:
        raise typer.Exit(1)


def repair(cache: CacheDir = None) -> None:
    """Drop damaged entries and what interrupted writes left behind, and rebuild the index."""
    from ragcachekit.bench.workspace import CacheFolder

    folder = CacheFolder.at(cache)
    with _bar("reading") as progress:
        done = folder.repair(progress)
    if done is None:
        typer.echo(f"no chunk KV in {folder.path}")
        return
    _list("dropped", done.damaged)
    typer.echo(
        f"dropped {len(done.damaged)} damaged entries and {done.orphans} files of interrupted writes; "
        f"{done.entries} entries, {size(done.nbytes)} are left and indexed"
    )


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over bytes, on the standard error."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors(), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _list(what: str, found: Sequence[BadEntry]) -> None:
    for bad in found:
        typer.echo(f"{what}: {bad.name[:16]}: {bad.reason}")


def clear(
    cache: CacheDir = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Only this one.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete chunk KV and vector indexes (the KV of one namespace only, if one is named)."""
    from ragcachekit.bench.workspace import CacheFolder

    folder = CacheFolder.at(cache)
    what = "all chunk KV and indexes" if namespace is None else f"the chunk KV of namespace {namespace!r}"
    if not yes:
        typer.confirm(f"Delete {what} in {folder.path}?", abort=True)
    typer.echo(f"deleted {folder.clear(namespace)} entries")
