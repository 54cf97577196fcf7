"""The admission check: does linking give, on the model itself, what the model would have computed?"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from ragcachekit.encode.encoders import ChunkEncoder
from ragcachekit.errors import ModelNotSupported
from ragcachekit.forward.attention import install, uninstall
from ragcachekit.forward.check import compare, tolerance_for
from ragcachekit.forward.linker import link
from ragcachekit.model.encoding import Encoding
from ragcachekit.model.kv import ChunkKV, decoder_of
from ragcachekit.model.rope import Rope
from ragcachekit.plan.link_plan import LinkPlan, Piece
from ragcachekit.reports import LinkReport

CHUNK, PROMPT = 24, 48
"""Tokens of the check's chunk and prompt: beyond the windows of test models, cheap for real ones."""


class Admission(NamedTuple):
    """A passed check: the largest difference and the allowed one, relative to a tensor's largest value."""

    difference: float
    tolerance: float


@torch.no_grad()
def admit(model: Any, rope: Rope) -> Admission:
    """Check the model; ModelNotSupported names the layer, what differs and by how much."""
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
        return Admission(max(offset, _check_link(model, rope, ids, tolerance)), tolerance)
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
