"""``ragcachekit check-model``: the admission check, and one comparison through RagCache."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.console import pairs, quiet_loading, show, written
from ragcachekit.commands.workspace import load_checked, load_tokenizer
from ragcachekit.errors import ModelNotSupported
from ragcachekit.types import Chunk, Prompt, Text

EXACT, REFUSED, WRONG = "exact", "refused", "wrong"
_PROMPT, _FIRST = 48, 24


def check_model(
    model: opt.ModelArgument = "", json: opt.Json = None, device: opt.Device = None, dtype: opt.Dtype = "auto"
) -> None:
    """Check whether chunk KV can be reused on a model without changing what it computes.

    Ends with 0 if it can (status exact), with 1 if the model is refused or the check found a difference.
    """
    quiet_loading()
    from ragcachekit.commands.report import BenchReport

    load_tokenizer(model)  # a folder without a model is named first
    found = check(load_checked(model, device, dtype)[0])
    written(BenchReport("check-model", model, 0, (vars(found),)), json)
    rows = {"family": found.family, "status": found.status, "reason": found.reason}
    if found.max_abs_diff is not None:
        rows["max difference"] = (
            f"{found.max_abs_diff:.2g} of the largest value, allowed {found.tolerance:.0e}"
        )
    show(pairs(rows))
    raise typer.Exit(0 if found.exact else 1)


@dataclass(frozen=True)
class ModelCheck:
    """Whether the library gives what the model computes.

    ``status`` is ``exact``, ``refused`` (the library does not link this model) or ``wrong`` (it does, with
    another answer than the model's own: a bug). ``max_abs_diff`` is relative to the greatest value of its
    tensor.
    """

    family: str
    status: str
    reason: str
    max_abs_diff: float | None
    tolerance: float | None

    @property
    def exact(self) -> bool:
        """Whether the model can be used."""
        return self.status == EXACT


def check(model: Any) -> ModelCheck:
    """Check a loaded model."""
    from ragcachekit.engine.admission import admit
    from ragcachekit.model.rope import describe_rope

    family = type(model).__name__
    try:
        passed = admit(model, describe_rope(model))
        difference = max(passed.difference, _answer_difference(model))
    except ModelNotSupported as error:
        return ModelCheck(family, REFUSED, str(error), None, None)
    if difference > passed.tolerance:
        reason = f"an exactly reused chunk changes the next token's logits by {difference:.2g} of the largest"
        return ModelCheck(family, WRONG, reason, difference, passed.tolerance)
    return ModelCheck(family, EXACT, "", difference, passed.tolerance)


def _answer_difference(model: Any) -> float:
    """Greatest relative difference of next-token logits through the store and link, against the model alone.

    A chunk at the prompt's start is exact, so ``reuse`` must give the model's own answer. Independent of the
    admission check, on purpose.
    """
    import torch

    from ragcachekit.engine.rag_cache import RagCache

    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (_PROMPT,), generator=torch.Generator().manual_seed(1))
    chunk = Chunk(token_ids=tuple(ids[:_FIRST].tolist()))
    prompt = Prompt([chunk, Text(token_ids=tuple(ids[_FIRST:].tolist()))])
    with torch.no_grad():
        own = model(input_ids=ids[None].to(model.device)).logits[0, -1].float()
    one: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    with (
        tempfile.TemporaryDirectory(prefix="ragcachekit-") as scratch,
        RagCache(model, policy="reuse", cold="now", cache_dir=scratch) as rag,
    ):
        rag.generate(prompt, **one)
        linked = rag.link(prompt)
        if linked.report.exact_tokens != _FIRST:
            raise ModelNotSupported(f"the chunk encoded for it was not reused: {linked.report}")
        out = model.generate(**linked.inputs, **one, output_logits=True, return_dict_in_generate=True)
    ours = out.logits[0][0].float()
    return float((ours - own).abs().max()) / (float(own.abs().max()) or 1.0)
