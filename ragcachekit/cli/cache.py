"""cache stats, verify, repair and clear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal as size
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from ragcachekit.cli.console import errors, show

if TYPE_CHECKING:
    from ragcachekit.commands.cache_content import CacheContent
    from ragcachekit.store.disk_check import BadEntry

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
    from ragcachekit.store.disk_check import verify

    bad = mend = False
    for tier in _content(cache).tiers:
        with _reading() as progress:
            found = verify(tier.path, progress)
        _list("damaged", found.damaged)
        _list("unreadable", found.unreadable)
        damaged = len(found.damaged)
        typer.echo(f"{tier.name}: {found.entries} entries, {size(found.nbytes)}: {damaged or 'none'} damaged")
        if found.orphans:
            typer.echo(f"{found.orphans} files of interrupted writes")
        mend |= bool(damaged or found.orphans)
        bad |= bool(damaged or found.unreadable)
    if mend:
        typer.echo("`ragcachekit cache repair` drops them")
    if bad:
        raise typer.Exit(1)


def repair(cache: ContentDir = None) -> None:
    """Drop damaged entries and what interrupted writes left behind."""
    from ragcachekit.store.disk_check import repair

    for tier in _content(cache).tiers:
        with _reading() as progress:
            done = repair(tier.path, progress)
        _list("dropped", done.damaged)
        typer.echo(
            f"{tier.name}: dropped {len(done.damaged)} damaged entries and {done.orphans} files of "
            f"interrupted writes; {done.entries} entries, {size(done.nbytes)} are left"
        )


def _content(cache: str | None) -> CacheContent:
    from ragcachekit.commands.cache_content import CacheContent

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
