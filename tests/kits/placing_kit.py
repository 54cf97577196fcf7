"""Made-up prompts over entries of every kind, and an independent account of where their KV belongs."""

from dataclasses import replace

import torch

from link_kit import described, plan_of
from ragcachekit.forward.linker import assemble
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope import LayerRope, Rope
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


def prompt(kvs, gap=3, rows=(), keep=None, first=0):
    """Entries one after the other, each after ``gap`` tokens of text, and text at the end."""
    pieces, at, computed = [], 0, []
    for kv in kvs:
        begin = at if kv.start is None else kv.start
        computed += range(at, begin)
        if kv.start is None:
            computed += range(begin, begin + gap)
            begin += gap
        cropped = keep is not None and keep + first < kv.tokens
        pieces.append(Piece(begin, kv, keep if cropped else None, first if cropped else 0))
        at = pieces[-1].stop
    computed += range(at, at + gap)
    return plan_of(range(at + gap), pieces, sorted({*computed, *rows}))


def changed(plan, change):
    """The plan with every entry changed once, however often it is used."""
    kvs = {id(p.kv): p.kv for p in plan.pieces}
    new = {key: change(kv) for key, kv in kvs.items()}
    return replace(plan, pieces=tuple(replace(p, kv=new[id(p.kv)]) for p in plan.pieces))


def assembled(plan, rope, device=CPU):
    """Keys and values of every layer, ``[heads, tokens, dim]``."""
    return [(keys[0], values[0]) for keys, values in (make() for make in assemble(plan, rope, device))]


def assert_placed(sides, plan, rope, rtol=1e-5):
    """Every piece where it belongs, rotated by the angles of its positions alone."""
    for index, pair in enumerate(sides):
        for piece in plan.pieces:
            want = piece.kv.keys[index][:, piece.rows], piece.kv.values[index][:, piece.rows]
            if piece.kv.start is None:
                at = torch.arange(piece.start, piece.stop)
                want = rope.place(index, *want, rope.angles(at, len(plan.token_ids)))
            for ours, theirs in zip(pair, want, strict=True):
                got = ours[:, piece.start : piece.stop].cpu()
                assert got.dtype == theirs.dtype
                torch.testing.assert_close(got, theirs, rtol=rtol, atol=rtol / 10)
