"""keys add and keys remove: API keys of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import note

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
) -> None:
    """Make an API key and print it. A running server accepts it at once."""
    from ragcachekit.server.keys import Limits, add_key

    key = add_key(file, name, namespace, opt.settings_of(Limits, locals()))
    typer.echo(key)
    note(f"the key of {name} is shown this once: {file} has only its hash")


def remove(name: Name, file: KeysFile) -> None:
    """Remove an API key. A running server refuses it from then on."""
    from ragcachekit.server.keys import remove_key

    remove_key(file, name)
    note(f"removed the key of {name}; what its namespace has cached stays")
