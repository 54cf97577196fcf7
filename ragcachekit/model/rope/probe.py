"""Probe of a model's rotations: a lone token runs at several positions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from transformers import DynamicCache

from ragcachekit.errors import ModelNotSupported
from ragcachekit.model.rope.rotation import LayerRope, Rope, RotaryTable, context_length, turn

PROBE_POSITIONS = (1, 7, 131)  # positions at which a lone token's key is compared with its key at position 0

_KV = tuple[torch.Tensor, torch.Tensor]


def describe_rope(model: Any) -> Rope:
    """Find every layer's rotation by probing the model with a lone token.

    A lone token attends only to itself, so its key at position p is its key at position 0 rotated by p, in
    every layer. This shows layout, rotated dimensions, theta per layer type and layers without rotation.

    ModelNotSupported if the model calls no rotary module, or a layer's keys fit none.
    """
    with _recorded_rotary_calls(model) as calls:
        try:
            at_zero = _lone_kv(model, 0)
            at = {p: _lone_kv(model, p) for p in PROBE_POSITIONS}
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise _no_plain_cache(model, error) from error
    if not calls:
        raise ModelNotSupported(
            f"{type(model).__name__} uses no rotary module (learned or relative positions, or a rotation "
            "inside its attention); only with one can a chunk's keys be placed at a new position"
        )
    tables = [RotaryTable(module, arguments) for module, arguments in calls]
    layers = [
        _fit_layer(index, kv, {p: kvs[index] for p, kvs in at.items()}, tables)
        for index, kv in enumerate(at_zero)
    ]
    return Rope(tables, layers, context_length(model))


def _fit_layer(index: int, at_zero: _KV, at: Mapping[int, _KV], tables: Sequence[RotaryTable]) -> LayerRope:
    sources = [tensor.float() for tensor in at_zero]
    targets = [torch.cat([kv[side] for kv in at.values()], -2).float() for side in (0, 1)]
    tolerance = 1e-4 if at_zero[0].dtype in (torch.float32, torch.float64) else 3e-2
    moved = [_off(source, target) > tolerance for source, target in zip(sources, targets, strict=True)]
    if not any(moved):
        return LayerRope(None)
    best, error = LayerRope(None), float("inf")
    side = 0 if moved[0] else 1
    for rope in _candidates(tables, targets[side].shape[-1]):
        off = _off(_turned(rope, sources[side], list(at), tables), targets[side])
        if off < error:
            best, error = replace(rope, values=side == 1), off
    if not error <= tolerance:
        raise ModelNotSupported(
            f"layer {index}: the keys of a lone token at positions {list(at)} are no rotation of its key at "
            f"position 0 by the model's rotary module (off by {error:.2g}, allowed {tolerance:.0e})"
        )
    return best


def _candidates(tables: Sequence[RotaryTable], width: int) -> Iterator[LayerRope]:
    for number, table in enumerate(tables):
        spare = width - 2 * table.angles(torch.tensor([1]), 2).cos.shape[-1]
        for offset in {0, spare} if spare >= 0 else set[int]():
            for interleaved, backwards in product((False, True), repeat=2):
                yield LayerRope(number, interleaved, offset, backwards)


def _turned(
    rope: LayerRope, source: torch.Tensor, positions: list[int], tables: Sequence[RotaryTable]
) -> torch.Tensor:
    """Key at position 0 rotated to all positions; each lone token was a prompt of its own length."""
    assert rope.table is not None
    each = [tables[rope.table].angles(torch.tensor([p]), p + 1) for p in positions]
    cos, sin = torch.cat([a.cos for a in each]), torch.cat([a.sin for a in each])
    return turn(rope, source.expand(*source.shape[:-2], len(positions), -1), cos, sin)


def _off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    size = float(theirs.abs().max()) or 1.0
    return float((ours - theirs).abs().max()) / size


def _no_plain_cache(model: Any, error: Exception | None = None) -> ModelNotSupported:
    text = model.config.get_text_config()
    kinds = [*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())]
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    why = f": {error}" if error else ": it puts no keys and values there"
    if others:
        why = f": it has layers of type {', '.join(others)}"
    return ModelNotSupported(f"{type(model).__name__} does not run on a plain key/value cache{why}")


@torch.no_grad()
def _lone_kv(model: Any, position: int) -> list[_KV]:
    """Keys and values of every layer, each ``[kv_heads, 1, head_dim]``, of one token at ``position``."""
    device = model.device
    token = torch.tensor([[min(5, model.config.get_text_config().vocab_size - 1)]], device=device)
    cache = DynamicCache()
    model(
        input_ids=token,
        position_ids=torch.tensor([[position]], device=device),
        past_key_values=cache,
        use_cache=True,
    )
    kv: list[Any] = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    if not kv or any(not isinstance(t, torch.Tensor) or t.dim() != 4 for pair in kv for t in pair):
        raise _no_plain_cache(model)
    return [(keys[0].cpu(), values[0].cpu()) for keys, values in kv]


@contextmanager
def _recorded_rotary_calls(model: Any) -> Iterator[list[tuple[torch.nn.Module, dict[str, Any]]]]:
    """Collect each distinct call of a rotary module: the module and its fixed arguments."""
    calls: list[tuple[torch.nn.Module, dict[str, Any]]] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        names = list(bound)
        fixed = {
            name: value
            for name, value in bound.items()
            if name != names[0] and name != "position_ids" and not isinstance(value, torch.Tensor)
        }
        if "position_ids" in bound and not any(m is module and f == fixed for m, f in calls):
            calls.append((module, fixed))

    handles = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in model.modules()
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
