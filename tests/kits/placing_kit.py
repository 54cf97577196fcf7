"""Made-up prompts over entries anywhere in memory, and what the CPU path makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from link_kit import described, plan_of
from ragcachekit.forward import linker
from ragcachekit.forward.placing import Placing
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope.rotation import LayerRope, Rope
from ragcachekit.plan.link_plan import Piece

CPU = torch.device("cpu")
LAYERS = 4


def entry(tokens, seed, shapes=((2, 16, 16),) * LAYERS, dtype=torch.float32, start=None):
    """Random KV; ``shapes`` are per layer ``(heads, key dim, value dim)``."""
    random = torch.Generator().manual_seed(seed)

    def side(heads, dim):
        return torch.randn(heads, tokens, dim, generator=random).to(dtype)

    keys = tuple(side(heads, dim) for heads, dim, _ in shapes)
    return ChunkKV(keys, tuple(side(heads, dim) for heads, _, dim in shapes), start)


def many_kinds():
    """A model whose layers rotate in every way there is: no model has them all, each has one."""
    llama, gemma = described("llama"), described("gemma3")
    layers = [
        LayerRope(0),
        LayerRope(1, interleaved=True),
        LayerRope(None),
        LayerRope(2, offset=4, backwards=True),
        LayerRope(0, values=True),
    ]
    return Rope([*llama.tables, *gemma.tables], layers, 512)


SHAPES = ((2, 16, 16), (2, 16, 12), (1, 8, 8), (2, 22, 6), (1, 32, 16))
"""Heads, key and value dimensions of the layers of :func:`many_kinds`: all differ."""


def prompt(kvs, gap=3, rows=(), keep=None):
    """Entries one after the other, each behind ``gap`` tokens of text, and text at the end."""
    pieces, at, computed = [], 0, []
    for kv in kvs:
        begin = at if kv.start is None else kv.start
        computed += range(at, begin)
        if kv.start is None:
            computed += range(begin, begin + gap)
            begin += gap
        pieces.append(Piece(begin, kv, keep if keep is not None and keep < kv.tokens else None))
        at = pieces[-1].stop
    computed += range(at, at + gap)
    return plan_of(range(at + gap), pieces, sorted({*computed, *rows}))


def prompts():
    """Named plans over layers of :func:`many_kinds`."""
    a, b, c = (entry(n, seed, SHAPES) for seed, n in enumerate((9, 1, 6)))
    prefix = entry(4, 9, SHAPES, start=0)
    return {
        "one": prompt([a, b, c]),
        "one chunk twice": prompt([a, b, a]),
        "behind an exact prefix": prompt([prefix, a, b], rows=(5, 6, 9)),
        "cropped": prompt([a, c], keep=4),
    }


def on(device, plan, near):
    """The same plan over tensors that the simulation watches; ``near(number)``: on the device already."""
    moved = {}
    for piece in plan.pieces:
        if id(piece.kv) not in moved:
            here = near(len(moved))
            moved[id(piece.kv)] = piece.kv.each(lambda t, here=here: device.put(t, device=here))
    return replace(plan, pieces=tuple(replace(p, kv=moved[id(p.kv)]) for p in plan.pieces))


def placing_of(plan, rope, device, room=0):
    return Placing(plan, rope, CPU, device, room=room)


def read(device, it, layers):
    """Each layer as the device sees it when it comes to it."""
    seen = {}
    for layer in range(layers):
        keys, values = it.layer(layer)

        def look(layer=layer, keys=keys, values=values):
            seen[layer] = keys.clone(), values.clone()

        device.compute(look)
    device.finish()
    return seen


def cpu_path(plan, rope):
    """Per layer, keys and values as they are put in place without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGCACHEKIT_KERNELS", "torch")
        buffers = linker.assemble(plan, rope, CPU)
    assert buffers.placing is None
    return [layer() for layer in buffers.layers]


def assert_as_on_cpu(seen, plan, rope):
    """Kept rows as the CPU path places them."""
    kept = [p for p in range(len(plan.token_ids)) if p not in plan.rows]
    for layer, pair in enumerate(cpu_path(plan, rope)):
        for ours, theirs in zip(seen[layer], pair, strict=True):
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours[0][:, kept], theirs[0][:, kept], rtol=1e-5, atol=1e-6)


NEAR = {"all near": lambda n: True, "all far": lambda n: False, "mixed": lambda n: n % 2 == 0}
