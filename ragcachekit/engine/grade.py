"""What of a prompt can be reused on a model: linked chunks, or exact beginnings alone."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.engine.admission import admit
from ragcachekit.errors import ModelNotSupported
from ragcachekit.files import make_folder, parse_json, read_regular
from ragcachekit.forward.attention import install
from ragcachekit.forward.check import compare, tolerance_for, why_not_together
from ragcachekit.model.kv import ChunkKV, KVLayout
from ragcachekit.model.rope import Rope, context_of, describe_rope
from ragcachekit.model.snapshots import PAST, SnapshotLayout, run
from ragcachekit.types import check_type

log = logging.getLogger(__name__)

CHECK_VERSION = 4  # raised when a check itself changes

TOKENS, CUTS = 40, (17, 31)
"""Tokens of the check's prompt, and after how many of them a snapshot is made."""


@dataclass(frozen=True, eq=False)
class Grade:
    """What can be reused exactly on a model.

    - ``name``: ``linked``: chunks at any place of a prompt. ``prefix``: beginnings of prompts.
    - ``why``: Why chunks cannot be linked, and why nothing can be reused, if so.
    - ``layout``: The shape of the KV; None where nothing can be reused.
    - ``alone``: Why requests are not decoded together, if so.
    """

    name: Literal["linked", "prefix"]
    rope: Rope
    layout: KVLayout | SnapshotLayout | None
    why: str = ""
    alone: str | None = "this model's caches are not decoded together"


def check_generates(model: Any) -> None:
    """ModelNotSupported for encoder-decoders and models without generate; ValueError in training mode."""
    check_type("model", model, nn.Module, "a loaded model (from_pretrained takes a folder or id)")
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if hasattr(model, "_orig_mod"):
        raise ModelNotSupported("the model is compiled; give the model itself, before torch.compile")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelNotSupported(f"{type(model).__name__} is an encoder-decoder; give a causal LM")
    if not hasattr(model, "generate") or not getattr(model, "can_generate", lambda: True)():
        raise ModelNotSupported(
            f"{type(model).__name__} has no generate; give a causal LM (AutoModelForCausalLM)"
        )


def grade_of(model: Any, fingerprint: str, folder: Path) -> Grade:
    """The grade of a model that generates, by checks on the model itself.

    That a model passed, for linking and for decoding requests together, is noted in a small file in
    ``folder``, for the next time; an unreadable or unwritable one only costs another check. A failure is not
    noted: it may have been a lack of memory.
    """
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "check": CHECK_VERSION}
    record = folder / "admitted" / f"{fingerprint}.json"
    with suppress(OSError, ValueError):
        if parse_json(read_regular(record)) == versions:
            install(model)
            return Grade("linked", describe_rope(model), KVLayout.of(model), alone=None)
    try:
        rope = describe_rope(model)
        log.info("admitted %s: %s", type(model).__name__, admit(model, rope))
    except ModelNotSupported as error:
        return _prefix_grade(model, str(error))
    except Exception as error:  # of the model's own code
        log.warning("%s could not be checked for linking", type(model).__name__, exc_info=True)
        return _prefix_grade(model, str(error) or type(error).__name__)
    alone = why_not_together(model)
    if alone is None:
        try:
            make_folder(record.parent)
            record.write_text(json.dumps(versions))
        except OSError as error:
            log.warning("could not note that the model passed its check: %s", error)
    return Grade("linked", rope, KVLayout.of(model), alone=alone)


def _prefix_grade(model: Any, why: str) -> Grade:
    log.info("%s: exact beginnings of prompts only: %s", type(model).__name__, why)
    _cancel_between_layers(model)
    rope = Rope((), (), context_of(model))
    try:
        layout = SnapshotLayout.of(model)
        check_snapshots(model, layout)
    except Exception as error:  # of the model's own code
        none = f"{why}; and nothing is reused, either: {error}"
        return Grade("prefix", rope, None, none)
    return Grade("prefix", rope, layout, why)


def _cancel_between_layers(model: Any) -> None:
    """Have every decoder layer look for a cancellation; linked models do in their attention.

    The hooks stay: removing them would change the model during other threads' forwards.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == count)
    for layer in next(lists, ()):
        if _look_for_cancellation not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_look_for_cancellation)


def _look_for_cancellation(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        raise_if_cancelled()


@torch.no_grad()
def check_snapshots(model: Any, layout: SnapshotLayout) -> float:
    """Go on from snapshots, twice from each, and compare with one prefill; returns the greatest difference.

    ModelNotSupported if logits differ by more than rounding.
    """
    vocab, tolerance = model.config.get_text_config().vocab_size, tolerance_for(model.dtype)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (1, TOKENS), generator=draw).to(model.device)
    found, known, worst = list[ChunkKV](), 0, 0.0
    for cut in (*CUTS, TOKENS):
        for text in (ids.roll(1, 1), ids):  # first something else, which must leave no trace in the snapshot
            prompt = torch.cat((ids[:, :known], text[:, known:cut]), 1)
            cache = layout.restored(found) if found else None
            ran = run(model, prompt, known, layout.argument if found else "", cache, keep=0)
        expected = run(model, ids[:, :cut], keep=0).logits[known:]
        what = f"going on from its own cache, logits after {known} tokens"
        worst = max(worst, compare(ran.logits, expected, tolerance, what))
        found += layout.captured(ran.cache, [(known, cut)], cut, state=True)
        known = cut
    more = torch.cat((ids, ids[:, :2]), 1)
    given: dict[str, Any] = {layout.argument: layout.restored(found), "input_ids": more[:, TOKENS:]}
    if layout.argument == PAST:
        given |= {"input_ids": more, "attention_mask": torch.ones_like(more)}
    try:
        model.generate(**given, max_new_tokens=1, do_sample=False)
    except Exception as error:  # of the model's own code
        raise ModelNotSupported(f"its generate does not go on from a given cache ({error})") from error
    return worst
