"""``ragcachekit check-model``: the check that every model passes before its chunks are linked."""

from __future__ import annotations

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.console import pairs, quiet_loading, show, written
from ragcachekit.commands.workspace import load_checked, load_tokenizer


def check_model(
    model: opt.ModelArgument = "", json: opt.Json = None, device: opt.Device = None, dtype: opt.Dtype = "auto"
) -> None:
    """Check whether chunk KV can be reused on a model without changing what it computes.

    Ends with 0 if it can (status exact), with 1 if the model is refused.
    """
    quiet_loading()
    from ragcachekit.commands.report import BenchReport
    from ragcachekit.engine.admission import admit
    from ragcachekit.errors import ModelNotSupported
    from ragcachekit.model.rope import describe_rope

    load_tokenizer(model)  # a folder without a model is named first
    lm = load_checked(model, device, dtype)[0]
    rows = {"family": type(lm).__name__, "status": "exact", "reason": ""}
    figures = dict[str, float]()
    try:
        passed = admit(lm, describe_rope(lm))
        figures = {"max_abs_diff": passed.difference, "tolerance": passed.tolerance}
        difference = "{max_abs_diff:.2g} of the largest value, allowed {tolerance:.0e}".format(**figures)
    except ModelNotSupported as error:
        rows |= {"status": "refused", "reason": str(error)}
        difference = ""
    written(BenchReport("check-model", model, 0, ({**rows, **figures},)), json)
    show(pairs({**rows, "max difference": difference}))
    raise typer.Exit(0 if figures else 1)
