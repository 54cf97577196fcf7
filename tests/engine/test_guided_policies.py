"""Policies that need the model to choose, through the facade: every way in gives one answer."""

import pytest

from engine_kit import PROMPT, chunk, text, warmed
from ragcachekit import Prompt
from soak_kit import soaked

POLICIES = [
    "query:0.2",
    "deep:0.2",
    "cacheblend:0.2",
    "cacheblend-gradual:0.3",
    "craft:0.5",
    "craft-focused:0.5",
]
ASKED = {"max_new_tokens": 8, "do_sample": False}
COLD = Prompt([text(9, 1), chunk(33, 2), chunk(21, 7), chunk(25, 3), text(6, 4)])


@pytest.mark.parametrize("name", ["gemma3"])
@pytest.mark.parametrize("policy", soaked(POLICIES, *POLICIES[::2]))
def test_every_way_in_gives_the_same_answer(name, policy):
    rag = warmed(name, PROMPT)
    one_pass = rag.generate(PROMPT, policy=policy, **ASKED)
    ahead = rag.generate(PROMPT, policy=policy, no_repeat_ngram_size=100, **ASKED)
    linked = rag.link(PROMPT, policy=policy)
    own = rag.model.generate(**linked.inputs, **ASKED)[0, linked.input_ids.shape[1] :]
    batch = rag.generate_batch([PROMPT, PROMPT], policy=policy, **ASKED)
    answers = [ahead.token_ids, tuple(own.tolist()), *(one.token_ids for one in batch)]
    assert all(other == one_pass.token_ids for other in answers)
    ratios = [ahead.report.link, linked.report, *(one.report.link for one in batch)]
    assert {round(r.recompute_ratio, 9) for r in ratios} == {round(one_pass.report.link.recompute_ratio, 9)}
    assert 0 < one_pass.report.link.recompute_ratio < 0.7


@pytest.mark.parametrize("policy", POLICIES)
def test_a_missing_chunk_is_computed_in_place(policy):
    rag = warmed("llama", PROMPT)
    report = rag.generate(COLD, policy=policy, **ASKED).report.link
    assert [use.source for use in report.uses] == ["host", "host", "computed", "host"]
    assert report.computed_tokens == 21 + 6
    assert report.recomputed_tokens + report.exact_tokens + report.approximate_tokens == 9 + 33 + 25


@pytest.mark.parametrize("policy", ["query:1", "cacheblend:1", "random:1", "prefix"])
def test_recomputing_everything_is_the_models_own_answer(policy):
    rag = warmed("qwen3", PROMPT)
    full = rag.generate(PROMPT, policy="full", **ASKED)
    assert rag.generate(PROMPT, policy=policy, **ASKED).token_ids == full.token_ids
