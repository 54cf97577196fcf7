"""doctor: why was nothing reused?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.cli import options as opt
from ragcachekit.errors import RagCacheError


def doctor(
    prompt: Annotated[
        str,
        typer.Argument(help="File with the prompt as the model gets it, text or JSON messages; - reads it."),
    ] = "",
    documents: Annotated[
        list[Path] | None,
        typer.Option("--documents", "-d", help="What was retrieved: text files, .jsonl, a folder of them."),
    ] = None,
    call: Annotated[
        str | None, typer.Option(help="module:function that returns the prompt and its documents.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Given to the function of --call.")] = None,
    model: opt.OptionalModel = None,
) -> None:
    """Say which documents of a prompt are found as chunks, why others are not, and what to change.

    Ends with 1 if some are not found. Only the tokenizer and the chat template of --model are loaded.
    """
    if bool(prompt) == (call is not None):
        raise RagCacheError("give the prompt's file and --documents, or --call module:function")
    from ragcachekit.commands import doctor as module

    if call is not None:
        asked, found = module.called(call, question)
    else:
        try:
            text = sys.stdin.read() if prompt == "-" else Path(prompt).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise RagCacheError(f"the prompt {prompt} cannot be read as text: {error}") from error
        asked, found = module.read_prompt(text), list(module.read_documents(documents or []))
    diagnosis = module.run(asked, found, model)
    typer.echo(str(diagnosis))
    if diagnosis.missing:
        raise typer.Exit(1)
