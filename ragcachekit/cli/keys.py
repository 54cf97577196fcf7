"""keys add, list and remove: API keys of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import note, show

KeysFile = Annotated[Path, typer.Option("--file", help="JSON; holds hashes of the keys, never the keys.")]
Name = Annotated[str, typer.Argument(help="Of the key; appears in logs and errors.")]


def add(
    name: Name,
    file: KeysFile,
    namespace: Annotated[
        str | None, typer.Option(help="Partition of all caches; keys with one share it. Default: the name.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Of prompts and answers.")] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    contexts: Annotated[int, typer.Option(min=1, help="Stored contexts.")] = 1000,
    context_tokens: Annotated[int, typer.Option(min=1, help="Of all stored contexts.")] = 10_000_000,
    body_bytes: Annotated[int | None, typer.Option(min=1, help="Of a request's body.")] = None,
) -> None:
    """Make an API key and print it. A running server knows it a second later."""
    from ragcachekit.server.keys import add_key
    from ragcachekit.server.tenants import Limits

    key = add_key(file, name, namespace, opt.settings_of(Limits, locals()))
    typer.echo(key)
    note(f"the key of {name} is shown this once: {file} has only its hash")


def list_(file: KeysFile) -> None:
    """Names, namespaces and limits."""
    from dataclasses import asdict

    from ragcachekit.server.keys import list_keys

    table = Table()
    for column in ("name", "namespace", "limits"):
        table.add_column(column)
    for tenant in list_keys(file):
        limits = ", ".join(f"{name} {value}" for name, value in asdict(tenant.limits).items() if value)
        table.add_row(escape(tenant.name), escape(tenant.namespace), limits)
    show(table)


def remove(name: Name, file: KeysFile) -> None:
    """Remove an API key. A running server refuses it a second later."""
    from ragcachekit.server.keys import remove_key

    remove_key(file, name)
    note(f"removed the key of {name}; what its namespace has cached stays")
