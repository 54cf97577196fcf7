"""Prompts that are answered together give what each gives alone."""

from __future__ import annotations

import pytest

from engine_kit import PROMPT, chunk, ids, rag_for, text, warmed
from families import greedy, plain
from ragcachekit import Prompt

SHORT = Prompt([text(9, 1), chunk(25, 3), text(3, 7)])
OTHER = Prompt([text(14, 8), chunk(33, 2), text(2, 9), chunk(7, 10), text(11, 11)])
NO_CHUNK = Prompt([text(30, 12)])
BARE = Prompt([chunk(25, 3), text(1, 13)])
NOT_CACHED = Prompt([text(5, 14), chunk(50, 15), text(4, 16)])
PROMPTS = [PROMPT, SHORT, OTHER, NO_CHUNK, BARE]


def greedy_ids(answers):
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2", "phi3-longrope", "gpt-oss", "glm4"])
@pytest.mark.parametrize("policy", ["reuse", "lego:4", "lego:1000", "lego0"])
def test_batch_is_singles(name, policy):
    rag = warmed(name, *PROMPTS, policy=policy)
    rag._path.cold = "never"
    prompts = [*PROMPTS, NOT_CACHED]
    asked = {"max_new_tokens": 5, "do_sample": False}
    batch = rag.generate_batch(prompts, **asked)
    singles = [rag.generate(prompt, **asked) for prompt in prompts]
    assert greedy_ids(batch) == greedy_ids(singles)
    for one, other in zip(batch, singles, strict=True):
        assert one.report.link.reused_tokens == other.report.link.reused_tokens
        assert one.report.link.recomputed_tokens == other.report.link.recomputed_tokens
    assert batch[-1].token_ids == greedy(plain(name), ids(NOT_CACHED), 5)
    if policy == "lego:1000":
        assert greedy_ids(batch) == [greedy(plain(name), ids(p), 5) for p in prompts]
    else:
        assert sum(answer.report.link.reused_tokens for answer in batch) > 150


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"no_repeat_ngram_size": 2}])
def test_options_that_need_the_pass_ahead(name, options):
    rag = warmed(name, *PROMPTS, policy="lego:4")
    asked = {"max_new_tokens": 6, "do_sample": False, **options}
    batch = rag.generate_batch(PROMPTS, **asked)
    assert greedy_ids(batch) == greedy_ids([rag.generate(p, **asked) for p in PROMPTS])


def test_a_cold_batch_encodes_what_it_missed_once():
    rag = rag_for("llama", policy="lego:1000")
    answers = rag.generate_batch(PROMPTS, max_new_tokens=3, do_sample=False)
    assert greedy_ids(answers) == [greedy(plain("llama"), ids(p), 3) for p in PROMPTS]
    entries = rag.stats()[0].entries
    again = rag.generate_batch(PROMPTS, max_new_tokens=3, do_sample=False)
    assert rag.stats()[0].entries == entries
    assert all(answer.report.link.computed_tokens < 14 for answer in again if answer.report.link.uses)


def test_max_length_counts_from_the_longest_prompt():
    wide_kept = Prompt([text(9, 1), chunk(60, 20), text(1, 21)])
    wide_rows = Prompt([text(60, 22), text(2, 23)])
    rag = warmed("llama", wide_kept, policy="reuse")
    rag._path.cold = "never"
    answers = rag.generate_batch([wide_kept, wide_rows], max_length=75, do_sample=False, eos_token_id=-1)
    assert [len(answer.token_ids) for answer in answers] == [5, 5]


def test_one_prompt_ends_before_the_others():
    rag = warmed("llama", *PROMPTS, policy="lego:1000")
    end = greedy(plain("llama"), ids(PROMPT), 10)[3]
    answers = rag.generate_batch(PROMPTS, max_new_tokens=10, do_sample=False, eos_token_id=end)
    assert greedy_ids(answers) == [greedy(plain("llama"), ids(p), 10, eos_token_id=end) for p in PROMPTS]
    assert answers[0].report.finish_reason == "stop"
    assert any(len(answer.token_ids) > len(answers[0].token_ids) for answer in answers)


def test_no_prompts_no_answers():
    assert rag_for("llama").generate_batch([]) == []


def test_the_same_prompt_twice_in_a_batch():
    rag = warmed("qwen3", PROMPT, policy="reuse")
    one, two = rag.generate_batch([PROMPT, PROMPT], max_new_tokens=6, do_sample=False)
    alone = rag.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert one.token_ids == two.token_ids == alone.token_ids
