"""``ragcachekit check-model``: the check that every model passes before its chunks are linked."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.console import pairs, quiet_loading, show, written
from ragcachekit.commands.workspace import load_checked, load_tokenizer


def check_model(
    model: opt.ModelArgument = "", json: opt.Json = None, device: opt.Device = None, dtype: opt.Dtype = "auto"
) -> None:
    """Check what can be reused on a model without changing what it computes.

    Ends with 0 where the grade is linked or prefix, with 1 if the model is refused.
    """
    quiet_loading()
    from ragcachekit.commands.report import BenchReport
    from ragcachekit.engine.grade import check_generates, grade_of
    from ragcachekit.errors import ModelNotSupported

    load_tokenizer(model)  # a folder without a model is named first
    lm = load_checked(model, device, dtype)[0]
    row: dict[str, Any] = {"family": type(lm).__name__}
    try:
        check_generates(lm)
        with tempfile.TemporaryDirectory(prefix="ragcachekit-") as scratch:  # no note of an earlier check
            grade = grade_of(lm, "checked", Path(scratch))
        layout = grade.layout
        row |= {"status": grade.name, "stored": "nothing" if layout is None else layout.stored}
        row |= {"token_bytes": 0 if layout is None else layout.token_bytes}
        row |= {"state_bytes": getattr(layout, "state_bytes", 0), "reason": grade.why}
    except ModelNotSupported as error:
        row |= {"status": "refused", "reason": str(error)}
    written(BenchReport("check-model", model, 0, (row,)), json)
    show(pairs({name: str(value) for name, value in row.items() if value}))
    raise typer.Exit(1 if row["status"] == "refused" else 0)
