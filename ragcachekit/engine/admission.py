"""The admission check: does linking give, on the model itself, what the model would have computed?"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from ragcachekit.encode.encoders import ChunkEncoder
from ragcachekit.errors import ModelNotSupported
from ragcachekit.files import make_folder, parse_json, read_regular
from ragcachekit.forward.attention import install, uninstall
from ragcachekit.forward.check import compare, tolerance_for
from ragcachekit.forward.linker import link
from ragcachekit.model.encoding import Encoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope import Rope
from ragcachekit.plan.link_plan import LinkPlan, Piece
from ragcachekit.reports import LinkReport

log = logging.getLogger(__name__)

CHECK_VERSION = 2  # raised when the check itself changes

CHUNK, PROMPT = 24, 48
"""Tokens of the check's chunk and prompt: beyond the windows of test models, cheap for real ones."""


@dataclass(frozen=True)
class Admission:
    """A passed check: the largest differences found, relative to the largest value of a tensor.

    ``offset_diff``: K and V of a chunk linked at several offsets. ``link_diff``: logits, K and V of a partly
    linked prompt, and the next token's logits.
    """

    offset_diff: float
    link_diff: float
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
    install(model)
    tolerance = tolerance_for(model.dtype)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    try:
        offset = _check_offsets(model, rope, ids[:CHUNK], tolerance)
        linked = _check_link(model, rope, ids, tolerance)
    except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
        uninstall(model)
        raise ModelNotSupported(
            f"{type(model).__name__} cannot run a linked forward{_bypass(model)}: {error}"
        ) from error
    except ModelNotSupported as error:
        uninstall(model)
        raise ModelNotSupported(f"{error}{_bypass(model)}") from error
    return Admission(offset, linked, tolerance)


def _bypass(model: Any) -> str:
    if getattr(model, "_supports_attention_backend", False):
        return ""
    return (
        " (its attention does not go through the interface of transformers, where linked rows are attended)"
    )


def _check_offsets(model: Any, rope: Rope, ids: list[int], tolerance: float) -> float:
    worst = 0.0
    for offset in sorted({1, 37, max(rope.context // 2, 1), max(rope.context - CHUNK, 1)}):
        length = offset + CHUNK
        if length > rope.context:
            continue
        encoding = Encoding("standalone", length=length if rope.depends_on_length else 0)
        ((_, chunk),) = ChunkEncoder(model, rope).encode([ids], encoding)
        positions = torch.arange(offset, length)
        own = DynamicCache()
        model.base_model(
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
    worst = 0.0
    for index, (ours, theirs) in enumerate(zip(inputs.cache.layers, own.layers, strict=True)):
        worst = max(worst, compare(ours.keys, theirs.keys, tolerance, f"layer {index}: linked keys"))
        worst = max(worst, compare(ours.values, theirs.values, tolerance, f"layer {index}: linked values"))
    worst = max(worst, compare(logits, ordinary[list(rows)], tolerance, "logits of the linked forward"))
    following = {
        "input_ids": torch.tensor([[ids[0]]], device=device),
        "position_ids": torch.tensor([[len(ids)]], device=device),
        "use_cache": True,
    }
    after = model(past_key_values=inputs.cache, **following).logits
    return max(
        worst,
        compare(after, model(past_key_values=own, **following).logits, tolerance, "the next token's logits"),
    )


def _exact_piece(cache: DynamicCache, rope: Rope, start: int, stop: int, length: int) -> Piece:
    angles = rope.angles(torch.arange(start, stop), length)
    kv = [
        rope.strip(i, layer.keys[0, :, start:stop], layer.values[0, :, start:stop], angles)
        for i, layer in enumerate(cache.layers)
    ]
    return Piece(start, ChunkKV(tuple(keys for keys, _ in kv), tuple(values for _, values in kv)))


def admit_once(model: Any, rope: Rope, fingerprint: str, folder: Path) -> None:
    """Run :func:`admit` unless this fingerprint passed under the same versions before.

    The record is a small file in ``folder``; an unreadable or unwritable one only costs another check.
    """
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "check": CHECK_VERSION}
    record = folder / "admitted" / f"{fingerprint}.json"
    try:
        if parse_json(read_regular(record)) == versions:
            install(model)
            return
    except (OSError, ValueError):
        pass
    passed = admit(model, rope)
    log.info("admitted %s: %s", type(model).__name__, passed)
    try:
        make_folder(record.parent)
        record.write_text(json.dumps(versions))
    except OSError as error:
        log.warning("could not note that the model passed its check: %s", error)
