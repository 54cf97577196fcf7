"""families: which model families are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.options import Json


def families(
    json: Json = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the table here.")] = None,
) -> None:
    """Check a tiny random model of every family of the installed transformers.

    Ends with 1 if any family was admitted and came out wrong.
    """
    quiet_loading()
    from benchmarks.families import check as module

    checks = module.run()
    report = module.report(checks)
    show(report.table("Families of causal language models, tiny random models"))
    typer.echo(module.summary(checks))
    written(report, json)
    if markdown is not None:
        markdown.write_text(module.markdown(checks))
    raise typer.Exit(1 if any(check.status == module.WRONG for check in checks) else 0)
