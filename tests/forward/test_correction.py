"""Recomputed rows correct the kept rows of their chunk; row by row, against the rule written out."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.functional import cosine_similarity

from families import build, off, prefill, tokens
from link_kit import described, linked, planned, segments
from ragcachekit.forward.correction import SHARPNESS, STRENGTHS
from ragcachekit.policies.registry import open_policy

PARTS = segments(
    ("text", tokens(5, 1)),
    ("chunk", tokens(11, 2)),
    ("text", tokens(3, 3)),
    ("chunk", tokens(17, 4)),
    ("chunk", tokens(4, 5)),
    ("text", tokens(6, 6)),
)
FAMILIES = ["llama", "gemma3", "glm4", "qwen2-yarn", "smollm3", "llama4"]


@dataclass(frozen=True)
class Every:
    """Recomputes every fifth row of a chunk but those of short ones, and may correct the others."""

    corrects: bool = True
    name: str = "every"
    encoder: str | None = None
    reads_cache: bool = True

    def select(self, chunks):
        return [p for c in chunks if c.tokens > 4 and not c.is_exact for p in range(c.start, c.stop, 5)]


def without_rope(name, layer, keys, values, length=None):
    rope, at = described(name), torch.arange(keys.shape[1])
    return rope.strip(layer, keys, values, rope.angles(at, length or len(at)))


def stored(name, layer, piece, length):
    keys, values = piece.kv.keys[layer], piece.kv.values[layer]
    return (keys, values) if piece.kv.start is None else without_rope(name, layer, keys, values, length)


@pytest.mark.parametrize("name", FAMILIES)
def test_kept_rows_move_by_part_of_what_similar_recomputed_rows_moved(name):
    plan = planned(name, PARTS, Every())
    found, rows = linked(name, plan), set(plan.rows)
    moved = 0.0
    for layer in range(plan.pieces[0].kv.layers):
        now = without_rope(name, layer, found.keys[layer], found.values[layer])
        by_values = not described(name).layers[layer].values
        for chunk, piece in zip(plan.placed, plan.pieces, strict=True):
            before = stored(name, layer, piece, len(plan.token_ids))
            again = [i for i in range(chunk.tokens) if chunk.start + i in rows]
            for i in set(range(chunk.tokens)) - set(again):
                for side, strength in enumerate(STRENGTHS):
                    for head in range(before[side].shape[0]):
                        old = before[side][head]
                        expected = old[i]
                        if layer and again and not chunk.is_exact:
                            alike = before[1 if by_values else 0][head]
                            cosines = torch.stack([cosine_similarity(alike[i], alike[j], 0) for j in again])
                            weights = (SHARPNESS * cosines).exp() / (SHARPNESS * cosines).exp().sum()
                            for weight, j in zip(weights, again, strict=True):
                                new = now[side][head, chunk.start + j]
                                expected = expected + strength * weight * (new - old[j])
                        assert off(now[side][head, chunk.start + i], expected) < 2e-5
                        moved = max(moved, off(expected, old[i]))
    assert moved > 1e-3, "some were corrected"


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_moves_without_it(name):
    plan = planned(name, PARTS, Every(corrects=False))
    found = linked(name, plan)
    for layer in range(plan.pieces[0].kv.layers):
        now = without_rope(name, layer, found.keys[layer], found.values[layer])
        for chunk, piece in zip(plan.placed, plan.pieces, strict=True):
            kept = [i for i in range(chunk.tokens) if chunk.start + i not in plan.rows]
            for ours, old in zip(now, stored(name, layer, piece, len(plan.token_ids)), strict=True):
                assert off(ours[:, [chunk.start + i for i in kept]], old[:, kept]) < 2e-5


def test_our_policies_correct_and_published_ones_do_not():
    names = ["sensitive:0.1", "impact:0.1", "lego:4", "query:0.1", "cacheblend:0.1", "craft:0.3", "reuse"]
    corrects = [name for name in names if getattr(open_policy(name), "corrects", False)]
    assert corrects == ["sensitive:0.1", "impact:0.1"]


def test_stored_rows_are_never_written_to():
    plan = planned("llama", PARTS, Every())
    copies = [piece.kv.each(torch.clone) for piece in plan.pieces]
    linked("llama", plan)
    for piece, copy in zip(plan.pieces, copies, strict=True):
        pairs = zip((*piece.kv.keys, *piece.kv.values), (*copy.keys, *copy.values), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_a_plan_whose_rows_are_all_recomputed_needs_no_correction():
    plan = planned("llama", PARTS, replace(Every(), name="all"))
    everything = replace(plan, rows=tuple(range(len(plan.token_ids))))
    assert off(linked("llama", everything).logits, prefill(build("llama"), plan.token_ids).logits) < 2e-5


def test_the_last_token_of_a_chunk_may_be_left_to_generate():
    found = []
    for corrects in (True, False):
        plan = planned("llama", PARTS[:4], Every(corrects)).without_last()
        assert plan.placed[-1].stop == len(plan.token_ids) + 1
        found.append(linked("llama", plan).keys[1])
    kept = [i for i in range(len(plan.token_ids)) if i not in plan.rows and i >= plan.placed[-1].start]
    moved = (found[0] - found[1])[:, kept].abs().amax((0, 2))
    assert kept
    assert (moved > 1e-6).all()


def test_a_policy_that_drops_rows_from_layer_to_layer_cannot_correct():
    class Dropping(Every):
        def narrow(self, layer, layers, rows, total, deviation):
            return list(rows)

    with pytest.raises(ValueError, match="cannot correct"):
        linked("llama", planned("llama", PARTS, Dropping()))
