"""The grade of a model as commands need it: by its configuration, without weights, or by the check."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ragcachekit.commands.workspace import CacheFolder, explained
from ragcachekit.errors import RagCacheError

if TYPE_CHECKING:
    from ragcachekit.engine.grade import Grade

CALIBRATE = "calibrate chooses which tokens of linked chunks to recompute"
FIDELITY = "bench fidelity compares ways to link chunks"
ESTIMATE = "estimate counts chunks that are linked"
"""What a command does that has no meaning where chunks are not linked."""

_LINKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_emb_base")


def why_prefix(name: str) -> str:
    """Why a model is surely of grade prefix by its configuration alone; empty if only the check can tell."""
    from transformers import AutoConfig

    from ragcachekit.model.loading import resolve_model

    with explained(name, ValueError):
        text = AutoConfig.from_pretrained(resolve_model(name)).get_text_config(decoder=True)
    kinds = [*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())]
    if others := sorted(set(map(str, kinds)) - _LINKED_LAYERS):
        return f"it has layers of type {', '.join(others)}"
    return "" if any(getattr(text, field, None) for field in _ROPE_FIELDS) else "it has no rotary embedding"


def check_linked(model: Any, tokenizer: Any, cache_dir: str | os.PathLike[str] | None, what: str) -> None:
    """RagCacheError if a loaded model is of grade prefix; else the model is as before."""
    from ragcachekit.forward.attention import is_installed, uninstall

    before = is_installed(model)
    grade = loaded_grade(model, tokenizer, cache_dir)
    if grade.name == "prefix":
        raise only_beginnings(what, grade.why)
    if not before:
        uninstall(model)


def only_beginnings(what: str, why: str) -> RagCacheError:
    """The refusal of a command that does ``what``; ``why`` the model's grade is prefix."""
    return RagCacheError(
        f"{what}; this model's grade is prefix ({why}): only exact beginnings are reused, and answers stay "
        "those of a full prefill; bench ttft and answer.report show what that saves"
    )


def loaded_grade(model: Any, tokenizer: Any, cache_dir: str | os.PathLike[str] | None) -> Grade:
    """The grade of a loaded model, by the check that engines make."""
    from ragcachekit.engine.grade import check_generates, grade_of
    from ragcachekit.model.identity import fingerprint

    check_generates(model)
    return grade_of(model, fingerprint(model, tokenizer).digest, CacheFolder.at(cache_dir).path)
