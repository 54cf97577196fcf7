"""cache stats and cache clear."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ragcachekit.cli.console import put, size
from ragcachekit.cli.options import CacheDir


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
