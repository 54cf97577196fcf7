"""Cache-Craft's formulas on examples worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragcachekit.policies.base import PlacedChunk
from ragcachekit.policies.craft import Craft, Impact, context_impact, focused, order_penalty, prefix_overlap
from ragcachekit.policies.registry import open_policy


@pytest.mark.parametrize(
    ("old", "new", "penalty"),
    [
        ("", "", 0),
        ("a", "ba", 0),
        ("ab", "ab", 0),
        ("ab", "ba", 1),
        ("abc", "cab", 2 / 3),  # c before a, c before b
        ("abc", "cba", 1),
        ("abcd", "bacd", 1 / 6),
        ("abcd", "xdycz", 1),  # only c and d are shared
        ("axb", "bxa", 1),
        # Separators: a's and b's own places swap, and each with the first separator between them.
        ("a-b-", "b-a-", 3 / 6),
        ("-a-b", "-b-a", 3 / 6),
        ("a-b-c", "a-c", 0),  # shared: a, first separator, c
    ],
)
def test_order_penalty(old, new, penalty):
    assert order_penalty(old, new) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("old", "inter", "new", "overlap"),
    [
        ("", (), "", 1),
        ("", (), "a", 0),
        ("ab", (3, 1), "", 0),
        ("ab", (3, 1), "b", 0.25),
        ("ab", (3, 1), "ca", 0.75),
        ("ab", (3, 1), "bca", 1),
        ("a-b-", (4, 2, 3, 1), "a-", 0.6),
        ("a-b-", (4, 2, 3, 1), "-b", 0.5),
        ("ab", (0, 0), "b", 0.5),  # all of it went into an attention sink
    ],
)
def test_prefix_overlap(old, inter, new, overlap):
    assert prefix_overlap(old, inter, new) == pytest.approx(overlap)


def test_context_impact():
    assert context_impact(0.0, 3.0) == 0.5
    assert context_impact(2.0, 1.0) == pytest.approx(1 / (1 + math.exp(-2)))
    assert context_impact(1e6, 1e-6) == 1.0
    assert (context_impact(0.0, 0.0), context_impact(1.0, 0.0)) == (0.5, 1.0)


SUMS = {
    "inter": torch.tensor([[2.0, 6.0], [4.0, 0.0]]),
    "intra": torch.tensor([8.0, 24.0]),
    "behind": torch.tensor([2.0, 3.0]),
    "outward": torch.tensor([0.1, 0.7, 0.2, 0.7]),
}


def test_impact_of_an_entry():
    impact = Impact.of(("s", "a"), SUMS, 4)
    # a: layers (2/2 + 6/3) / 4 and (4/2 + 0) / 4, mean 0.625; b: (8/16 + 24/16) / 2 = 1
    assert impact.cci == pytest.approx(1 / (1 + math.exp(-0.625)))
    assert impact.inter == (3.0, 3.0)
    assert impact.overlap(("s", "b")) == 0.5
    assert impact.overlap(("a", "s")) == 0.0
    assert impact.cost(("s", "a")) == 0.0
    assert Impact.of(("s",), {"asked": SUMS["outward"]}, 4) == Impact() == Impact((), (), 0.5)


def placed(before, behind=(), sums=None, is_exact=False, start=10, name="x"):
    return PlacedChunk(name, start, 4, is_exact, before=before, context=behind, sums=sums or {})


def test_the_tokens_that_leaned_on_the_old_context():
    chunk = placed(("s", "b"), ("s", "a"), SUMS)
    # CFO is 0.5 / (1 + e^-0.625) = 0.33 at α = 1: two of four tokens; at most 1, all of them, at α = 4.
    assert Craft(1.0).select([chunk]) == [11, 13]
    assert Craft(0.5).select([chunk]) == [11]
    assert sorted(Craft(4.0).select([chunk])) == [10, 11, 12, 13]
    assert Craft(4.0).select([placed(("s", "a"), ("s", "a"), SUMS)]) == []
    assert Craft(4.0).select([placed(("s", "b"), ("s", "a"), SUMS, is_exact=True)]) == []


def test_a_chunk_that_saw_nothing_is_taken_from_its_beginning():
    assert Craft(1.0).select([placed(("s",))]) == [10, 11]
    assert Craft(1.0).select([placed(("s",), ("s",), {"asked": torch.ones(1, 4)})]) == [10, 11]
    assert Craft(1.0).select([placed(())]) == []


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([], []),
        ([1.0], [0]),
        ([5.0, 1.0], [0, 1]),
        ([1.0, 1.0, 1.0], [0, 1, 2]),
        # gaps 5, 3, 2 of 10: the entropy grows by 0.361 with the second, 0.322 with the third
        ([10.0, 5.0, 2.0, 0.0], [0]),
        ([2.0, 0.0, 10.0, 5.0], [2]),
        # gaps 1, 1, 8: growth 0.230, 0.179 (-p log p falls again above 1/e)
        ([10.0, 9.0, 8.0, 0.0], [0]),
        # gaps 6, 0.5, 3.5: growth 0.150, 0.367
        ([10.0, 4.0, 3.5, 0.0], [0, 1]),
    ],
)
def test_focus(scores, kept):
    assert sorted(focused(scores)) == kept


IDS = st.lists(st.sampled_from("abcde-"), max_size=9)


@given(IDS, IDS, st.randoms(use_true_random=False))
def test_scores_keep_their_bounds(old, new, draw):
    inter = [draw.random() for _ in old]
    impact = Impact(tuple(old), tuple(inter), 0.5 + draw.random() / 2)
    assert 0 <= order_penalty(old, new) <= 1
    assert order_penalty(old, new) == pytest.approx(order_penalty(new, old))
    assert 0 <= impact.overlap(new) <= 1 + 1e-12
    assert impact.overlap(old) == pytest.approx(1)
    assert 0 <= impact.cost(new) + 1e-12 <= 1 + 1e-9
    if not set(old) & set(new) and old:
        assert impact.cost(new) == impact.cci


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_the_focus_is_the_top(scores):
    kept = focused(scores)
    assert kept
    assert min(scores[i] for i in kept) >= max((s for i, s in enumerate(scores) if i not in kept), default=0)


@pytest.mark.parametrize("argument", ["0", "-1", "nan", "inf", "x", ""])
@pytest.mark.parametrize("kind", ["craft", "craft-focused"])
def test_alphas_that_make_no_sense(kind, argument):
    with pytest.raises(ValueError, match="craft"):
        open_policy(f"{kind}:{argument}")
