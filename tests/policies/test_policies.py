"""Which rows each policy chooses, by name."""

import pytest

from families import tokens
from link_kit import planned, segments
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.policies.registry import known_policies, open_policy

CHUNKS = [PlacedChunk("a", 0, 9, True), PlacedChunk("b", 9, 30, False), PlacedChunk("c", 50, 3, False)]


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("reuse", []),
        ("lego0", []),
        ("lego:1", [9, 50]),
        ("lego:5", [9, 10, 11, 12, 13, 50, 51, 52]),
        ("full", [*range(9, 39), 50, 51, 52]),
    ],
)
def test_selection_skips_exempt_chunks(name, positions):
    policy = open_policy(name)
    assert sorted(policy.select(CHUNKS)) == positions
    assert policy.name == name


@pytest.mark.parametrize(
    "name", ["", "lego", "lego:", "lego:x", "lego:0", "lego:-1", "full:3", "reuse:", "LEGO:4"]
)
def test_bad_names_say_what_to_write(name):
    with pytest.raises(ValueError, match="polic"):
        open_policy(name)


@pytest.mark.parametrize("name", ["lego:x", "query:", "craft:much", "lego:1.5"])
def test_a_word_for_a_number_gets_an_example(name):
    with pytest.raises(ValueError, match=r"is no number; write for example '(lego|query|craft):[\d.]+'"):
        open_policy(name)


def test_known_names_can_be_opened():
    assert [open_policy(name).name for name in known_policies()] == list(known_policies())


def test_lego0_insists_on_its_encoder():
    assert open_policy("lego0").encoder == "sinks:4"
    assert open_policy("lego:4").encoder is None


def test_recompute_ratio_counts_cached_rows_only():
    parts = segments(("text", tokens(10, 1)), ("chunk", tokens(30, 2)), ("text", tokens(20, 3)))
    report = planned("llama", parts, "lego:4").report
    assert report.recompute_ratio == pytest.approx(4 / 40)
    assert (report.exact_tokens, report.approximate_tokens) == (10, 26)
    assert (report.recomputed_tokens, report.computed_tokens) == (4, 20)


def test_the_last_row_is_computed_whatever_the_policy_says():
    parts = segments(("text", tokens(10, 1)), ("chunk", tokens(30, 2)))
    plan = planned("llama", parts, "reuse")
    assert plan.rows == (39,)
    assert plan.report.recomputed_tokens == 1
