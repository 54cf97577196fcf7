"""What of a prompt can be reused on a model: linked chunks, or exact beginnings alone."""

from __future__ import annotations

import json
import logging
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.encode.encoders import ChunkEncoder
from ragcachekit.errors import ModelNotSupported, RagCacheError
from ragcachekit.files import make_folder, parse_json, read_regular
from ragcachekit.forward.attention import install, uninstall
from ragcachekit.forward.decode import RequestKV, decode
from ragcachekit.forward.linker import link
from ragcachekit.model.encoding import Encoding
from ragcachekit.model.kv import ChunkKV, KVLayout, decoder_of
from ragcachekit.model.rope import Rope, context_of, describe_rope, note_of, rope_of_note
from ragcachekit.model.snapshots import PAST, SnapshotLayout, run
from ragcachekit.plan.link_plan import LinkPlan, Piece
from ragcachekit.reports import LinkReport
from ragcachekit.types import check_type

log = logging.getLogger(__name__)

CHECK_VERSION = 5  # raised when a check itself changes

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

    That a model passed, for linking and for decoding requests together, is noted with its RoPE in a small
    file in ``folder``, for the next time; an unreadable or unwritable one only costs another check. A failure
    is not noted: it may have been a lack of memory.
    """
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "check": CHECK_VERSION}
    record = folder / "admitted" / f"{fingerprint}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        noted = parse_json(read_regular(record))
        if noted["versions"] == versions:
            rope = rope_of_note(model, noted["rope"])
            install(model)
            return Grade("linked", rope, KVLayout.of(model), alone=None)
    try:
        rope = describe_rope(model)
        log.info("admitted %s: linking differs by %.2g at most", type(model).__name__, admit(model, rope))
    except ModelNotSupported as error:
        return _prefix_grade(model, str(error))
    except Exception as error:  # of the model's own code
        log.warning("%s could not be checked for linking", type(model).__name__, exc_info=True)
        return _prefix_grade(model, str(error) or type(error).__name__)
    alone = why_not_together(model)
    if alone is None:
        try:
            make_folder(record.parent)
            record.write_text(json.dumps({"versions": versions, "rope": note_of(rope)}))
        except (OSError, TypeError) as error:  # an argument of a rotary module may be no JSON
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


# -- the check for linking -------------------------------------------------------------------------

CHUNK, PROMPT = 24, 48
"""Tokens of the check's chunk and prompt: beyond the windows of test models, cheap for real ones."""


@torch.no_grad()
def admit(model: Any, rope: Rope) -> float:
    """Check that linking gives what the model computes; returns the largest difference, relative.

    ModelNotSupported names the layer, what differs and by how much.
    """
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise ModelNotSupported(
            f"the model is spread over {sorted(map(str, devices))}; load it on one device "
            "(without device_map='auto')"
        )
    why_not = _unmasked_window(model, rope.context) or rope.why_not_linked(PROMPT)
    if why_not is not None:
        raise ModelNotSupported(f"{type(model).__name__} cannot be linked: {why_not}")
    install(model)
    config = model.config.get_text_config()
    depth = {} if model.device.type == "cpu" else {"layers": getattr(config, "num_hidden_layers", 0)}
    tolerance = tolerance_for(model.dtype, **depth)
    ids = torch.randint(config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    try:
        offset = _check_offsets(model, rope, ids[:CHUNK], tolerance)
        return max(offset, _check_link(model, rope, ids, tolerance))
    except (RuntimeError, TypeError, AttributeError, LookupError, ValueError, ModelNotSupported) as error:
        uninstall(model)
        known = isinstance(error, ModelNotSupported)
        why = str(error) if known else f"{type(model).__name__} cannot run a linked forward: {error}"
        if not getattr(model, "_supports_attention_backend", False):
            why += "; its attention does not go through the interface of transformers"
        raise ModelNotSupported(why) from error


def _unmasked_window(model: Any, context: int) -> str | None:
    """What is wrong with a window that the cache has and no mask (Moshi, with a longer context than its own).

    The check cannot detect it: its prompt fits into the window.
    """
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    made = vars(sys.modules[type(decoder_of(model)).__module__])
    if not window or window >= context or "create_causal_mask" not in made:
        return None
    if {"create_sliding_window_causal_mask", "create_masks_for_generate"} & made.keys():
        return None
    return f"its cache drops keys after {window} tokens, but its attention has no such window"


def _check_offsets(model: Any, rope: Rope, ids: list[int], tolerance: float) -> float:
    worst, most = 0.0, rope.exact_up_to
    for offset in sorted({1, 37, max(most // 2, 1), max(most - CHUNK, 1)}):
        length = offset + CHUNK
        if length > most:
            continue
        encoding = Encoding("standalone", length=length if rope.depends_on_length else 0)
        ((_, chunk),) = ChunkEncoder(model, rope).encode([ids], encoding)
        positions = torch.arange(offset, length)
        own = DynamicCache()
        decoder_of(model)(
            input_ids=torch.tensor([ids], device=model.device),
            position_ids=positions[None].to(model.device),
            past_key_values=own,
            use_cache=True,
        )
        angles = rope.angles(positions, length)
        for index, layer in enumerate(own.layers):
            keys, values = rope.place(index, chunk.keys[index], chunk.values[index], angles)
            for what, ours, theirs in (("keys", keys, layer.keys[0]), ("values", values, layer.values[0])):
                # The first layer's keys and values come from embeddings and rotation alone.
                why = "" if index == 0 else "; attention depends on positions and not on distances alone"
                at = f"layer {index}: {what} at offset {offset}"
                worst = max(worst, compare(ours, theirs, tolerance, at, why))
    return worst


def _check_link(model: Any, rope: Rope, ids: list[int], tolerance: float) -> float:
    """Link some rows of an ordinary prefill exactly, compute the others, and compare with that prefill."""
    device = model.device
    own = DynamicCache()
    ordinary = model(
        input_ids=torch.tensor([ids], device=device), past_key_values=own, use_cache=True
    ).logits[0]
    pieces = [_exact_piece(own, rope, start, stop, len(ids)) for start, stop in ((0, 9), (13, 30), (33, 44))]
    kept = {p for piece in pieces for p in range(piece.start, piece.start + piece.kv.tokens)} - {14, 20, 21}
    rows = tuple(p for p in range(len(ids)) if p not in kept)
    report = LinkReport("reuse", "standalone", "", len(ids))
    inputs = link(LinkPlan(tuple(ids), tuple(pieces), rows, (), report), rope, device)
    logits = model(
        input_ids=inputs.input_ids[:, -len(rows) :],
        position_ids=inputs.position_ids[:, -len(rows) :],
        attention_mask=inputs.attention_mask,
        past_key_values=inputs.cache,
        use_cache=True,
    ).logits[0]
    if any(getattr(layer, "rows", True) for layer in inputs.cache.layers):
        raise ModelNotSupported("a layer never updated its cache: it shares KV with another layer")
    pairs = [(logits, ordinary[list(rows)], "logits of the linked forward")]
    for index, (ours, theirs) in enumerate(zip(inputs.cache.layers, own.layers, strict=True)):
        pairs.append((ours.keys.clone(), theirs.keys.clone(), f"layer {index}: linked keys"))
        pairs.append((ours.values.clone(), theirs.values.clone(), f"layer {index}: linked values"))
    following = {
        "input_ids": torch.tensor([[ids[0]]], device=device),
        "position_ids": torch.tensor([[len(ids)]], device=device),
        "use_cache": True,
    }
    after, expected = (model(past_key_values=cache, **following).logits for cache in (inputs.cache, own))
    pairs.append((after, expected, "the next token's logits"))
    return max(compare(ours, theirs, tolerance, what) for ours, theirs, what in pairs)


def _exact_piece(cache: DynamicCache, rope: Rope, start: int, stop: int, length: int) -> Piece:
    angles = rope.angles(torch.arange(start, stop), length)
    kv = [
        rope.strip(i, layer.keys[0, :, start:stop], layer.values[0, :, start:stop], angles)
        for i, layer in enumerate(cache.layers)
    ]
    return Piece(start, ChunkKV(tuple(keys for keys, _ in kv), tuple(values for _, values in kv)))


# -- the check for decoding together, and comparisons ----------------------------------------------------

PROMPTS, STEPS = (17, 12), 3
"""Tokens of the batch check's prompts, beyond the windows of test models, and decoded after each."""


def tolerance_for(dtype: torch.dtype, layers: int = 16) -> float:
    """Allowed relative difference: rounding of two different orders of the same sums.

    In half precision it grows with the root of the ``layers``, where they are given, as rounding does: 32
    random layers in bfloat16 differed from themselves at another position by 0.060 on an H100. On a CPU it
    was 0.015, and the allowance for 16 layers is enough.
    """
    if dtype in (torch.float32, torch.float64):
        return 1e-4
    return 6e-2 * math.sqrt(max(1.0, layers / 16))


def compare(ours: Tensor, theirs: Tensor, tolerance: float, what: str, why: str = "") -> float:
    """The difference of two ``[..., rows, dim]``, relative to the largest value.

    ModelNotSupported, which begins with ``what``, if it is above ``tolerance``.
    """
    exact = theirs.dtype in (torch.float32, torch.float64)
    if ours.shape != theirs.shape:
        raise ModelNotSupported(f"{what}: shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    ours, size = ours.to(theirs.device), float(theirs.abs().max()) or 1.0  # chunks are encoded to the host
    rows = (ours.float() - theirs.float()).abs().transpose(-2, 0).flatten(1).amax(1) / size
    # In half precision a router that is undecided between two experts sends a token or two another way,
    # which is no error of linking; a wrong rotation, mask or scale shows in most rows.
    difference = float(rows.max() if exact else rows.median())
    if not difference <= tolerance:
        raise ModelNotSupported(
            f"{what} differ from the model's own by {difference:.2g} of the largest value "
            f"(allowed {tolerance:.0e}){why if exact else ''}"
        )
    return difference


@torch.no_grad()
def why_not_together(model: Any) -> str | None:
    """Why the model cannot decode several requests in one forward, or None.

    Two random prompts are decoded together, and their logits compared with those of a forward of each alone.
    """
    vocab, draw = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(1)
    ids = [torch.randint(vocab, (count + STEPS,), generator=draw).tolist() for count in PROMPTS]
    caches, expected = [DynamicCache() for _ in ids], []
    try:
        for own, cache in zip(ids, caches, strict=True):
            out = model(torch.tensor([own], device=model.device), past_key_values=cache, use_cache=True)
            expected.append(out.logits[0, -STEPS:])
        requests = [RequestKV(cache, count, STEPS) for cache, count in zip(caches, PROMPTS, strict=True)]
        steps = [decode(model, requests, [own[at] for own in ids]) for at in range(-STEPS, 0)]
        for item, alone in enumerate(expected):
            ours = torch.stack([logits[item] for logits in steps])
            compare(ours, alone, tolerance_for(model.dtype), "logits of requests decoded together")
    except (RagCacheError, RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
        return f"{type(model).__name__} cannot decode requests together: {error}"
    return None
