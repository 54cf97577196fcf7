"""Invariant 1: at ratio 1.0, and wherever kept rows are exact, linking is the ordinary prefill."""

import random

import pytest
import torch

from families import EACH, off, plain, prefill, tokens
from link_kit import Everything, ids_of, linked, piece, plan_of, planned, segments

TOLERANCE = 1e-5
# bfloat16 has 8 bits: two orders of the same sums differ by some roundings of 0.4 % each.
TOLERANCE_BF16 = 4e-2
BF16 = ("llama", "qwen2-yarn", "mistral-sliding", "gemma3", "glm4")

PARTS = segments(
    ("text", tokens(9, 1)), ("chunk", tokens(30, 2)), ("chunk", tokens(45, 3)), ("text", tokens(7, 4))
)
IDS = ids_of(PARTS)


def assert_same(ours, theirs, tolerance=TOLERANCE):
    computed = ~ours.logits.isnan().any(-1)
    assert computed[-1], "the last row is always computed"
    assert off(ours.logits[computed], theirs.logits[computed]) <= tolerance
    for index, (k, v) in enumerate(zip(ours.keys, ours.values, strict=True)):
        assert off(k, theirs.keys[index]) <= tolerance, f"keys of layer {index}"
        assert off(v, theirs.values[index]) <= tolerance, f"values of layer {index}"


@pytest.mark.parametrize("name", EACH)
def test_all_rows_recomputed(name):
    plan = planned(name, PARTS, Everything())
    assert plan.rows == tuple(range(len(IDS)))
    assert plan.report.recompute_ratio == 1.0
    assert_same(linked(name, plan), prefill(plain(name), IDS))


@pytest.mark.parametrize("name", EACH)
def test_all_but_the_exact_prefix_recomputed(name):
    plan = planned(name, PARTS, "lego:1000")
    assert plan.report.exact_tokens == plan.kept == 9
    assert_same(linked(name, plan), prefill(plain(name), IDS))


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_rows_recomputed_over_exact_kept_ones(name, seed):
    ordinary = prefill(plain(name), IDS)
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(IDS)), 6))
    pieces = [piece(ordinary, a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    covered = [p for x in pieces for p in range(x.start, x.start + x.kv.tokens)]
    recomputed = set(draw.sample(covered, len(covered) // 4))
    rows = [p for p in range(len(IDS)) if p not in covered or p in recomputed or p == len(IDS) - 1]
    assert len(rows) < len(IDS)
    assert_same(linked(name, plan_of(IDS, pieces, rows)), ordinary)


@pytest.mark.parametrize("name", BF16)
def test_bfloat16_within_its_tolerance(name):
    plan = planned(name, PARTS, Everything(), dtype=torch.bfloat16)
    ordinary = prefill(plain(name, torch.bfloat16), IDS)
    assert_same(linked(name, plan, torch.bfloat16), ordinary, TOLERANCE_BF16)


@pytest.mark.parametrize("name", EACH)
class TestBehindExactlyTheEncodingContext:
    """Nothing is recomputed here, and the outcome is still the ordinary prefill's."""

    def test_system_encoding_behind_the_system_text(self, name):
        parts = segments(("text", tokens(9, 1)), ("chunk", tokens(70, 2)), ("text", tokens(5, 3)))
        plan = planned(name, parts, "reuse", encoder="system")
        assert plan.rows == tuple(range(79, 84))
        assert plan.report.exact_tokens == 79
        assert plan.report.approximate_tokens == 0
        assert_same(linked(name, plan), prefill(plain(name), ids_of(parts)))

    @pytest.mark.parametrize("policy", ["reuse", "lego:4", "lego0"])
    def test_chunk_at_position_0(self, name, policy):
        parts = segments(("chunk", tokens(40, 2)), ("text", tokens(5, 3)))
        plan = planned(name, parts, policy)
        assert plan.rows == tuple(range(40, 45))
        assert plan.report.exact_tokens == 40
        assert_same(linked(name, plan), prefill(plain(name), ids_of(parts)))

    def test_short_prefix_of_a_long_prompt(self, name):
        """With longrope the prefix was encoded alone, in another regime than the prompt's."""
        parts = segments(("text", tokens(9, 1)), ("chunk", tokens(30, 2)), ("text", tokens(80, 3)))
        plan = planned(name, parts, "lego:1000")
        assert plan.report.exact_tokens == 9
        assert_same(linked(name, plan), prefill(plain(name), plan.token_ids))
