"""Prompts without chunks: every beginning is kept in blocks, and what is reused is exact."""

from typing import Any

import pytest
import torch

from engine_kit import bare, chunk, ids, rag_for, text
from families import LONGROPE_THRESHOLD, tokens
from ragcachekit import Prompt, RagCache, Text, TreeConfig
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import BLOCK
from server_kit import engine
from speaking import byte_level, speaker

FAMILIES = ["llama", "mistral-sliding", "gemma2", "gemma3", "gpt-oss", "qwen3", "cohere"]
POLICIES = ["prefix", "reuse", "lego:4", "query:0.2", "cacheblend:0.3", "impact:0.1"]
ASKED = {"max_new_tokens": 5, "do_sample": False}
LENGTH = 5 * BLOCK + 7
PLAIN = Prompt([text(LENGTH, 1)])
HALF = Prompt([Text(token_ids=(*tokens(LENGTH, 1)[: 2 * BLOCK + 9], *tokens(3 * BLOCK, 2)))])
"""Begins as ``PLAIN`` does, and goes on by itself inside its third block."""


def tree_of(**options: Any) -> KnowledgeTree:
    return KnowledgeTree(**{"host_bytes": 1 << 28, **options})


def ask(rag: RagCache, prompt: Any, **options: Any) -> tuple[tuple[int, ...], int]:
    """The answer's tokens, and how many of the prompt's were reused."""
    answer = rag.generate(prompt, **{**ASKED, **options})
    link = answer.report.link
    assert link.approximate_tokens == 0
    assert link.recomputed_tokens <= 1, "the last row"
    assert link.exact_tokens + link.recomputed_tokens + link.computed_tokens == link.prompt_tokens
    return answer.token_ids, link.exact_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_a_repeated_prompt_computes_only_its_end(name: str) -> None:
    with rag_for(name, policy="reuse", tree=tree_of()) as rag:
        for prompt, reused in ((PLAIN, 0), (PLAIN, 5 * BLOCK), (PLAIN, 5 * BLOCK), (HALF, 2 * BLOCK)):
            assert ask(rag, prompt) == (bare(name, prompt), reused)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_policies_that_reuse_do_and_full_does_not(policy: str) -> None:
    with rag_for("llama", policy=policy, tree=tree_of()) as rag:
        assert [ask(rag, PLAIN)[1] for _ in range(2)] == [0, 5 * BLOCK]
        assert ask(rag, PLAIN, policy="full") == (bare("llama", PLAIN), 0)


def test_the_last_token_is_always_computed() -> None:
    whole = Prompt([text(2 * BLOCK, 1)])
    with rag_for("llama", policy="reuse", tree=tree_of()) as rag:
        ask(rag, whole)
        assert ask(rag, whole) == (bare("llama", whole), 2 * BLOCK - 1)


def test_the_next_turn_reuses_prompt_and_answer() -> None:
    with rag_for("llama", policy="reuse", tree=tree_of()) as rag:
        first = rag.generate(PLAIN, max_new_tokens=2 * BLOCK, min_new_tokens=2 * BLOCK, do_sample=False)
        said = (*ids(PLAIN), *first.token_ids)
        second = Prompt([Text(token_ids=(*said, *tokens(9, 3)))])
        known = (len(said) - 1) // BLOCK * BLOCK  # the answer's last token was never run
        assert ask(rag, second) == (bare("llama", second), known)
        third = Prompt([Text(token_ids=(*ids(second), *tokens(2, 4)))])
        assert ask(rag, third) == (bare("llama", third), len(ids(second)) // BLOCK * BLOCK)


def test_frequencies_that_depend_on_the_length_are_kept_apart() -> None:
    name, short = "phi3-longrope", Prompt([text(BLOCK + 5, 1)])
    long = Prompt([Text(token_ids=(*ids(short), *tokens(LONGROPE_THRESHOLD - 1, 2)))])
    with rag_for(name, policy="reuse", tree=tree_of()) as rag:
        for prompt, reused in (
            (short, 0),
            (long, 0),
            (short, BLOCK),
            (long, len(ids(long)) // BLOCK * BLOCK),
        ):
            assert ask(rag, prompt) == (bare(name, prompt), reused)


def test_a_long_system_text_and_question_around_chunks_are_kept_too() -> None:
    system, question = text(2 * BLOCK + 5, 1), text(BLOCK + 6, 4)
    one, other = chunk(33, 11), chunk(25, 12)
    with rag_for("llama", policy="prefix", tree=tree_of()) as rag:
        prompt = Prompt([system, one, other, question])
        ask(rag, prompt)
        assert ask(rag, prompt) == (bare("llama", prompt), len(ids(prompt)) - 6)
        link = rag.generate(prompt, **ASKED).report.link
        assert (link.prefix.tokens, link.prefix.source) == (2 * BLOCK + 5, "tree:host")
        assert [use.tokens for use in link.chunks] == [33, 25, BLOCK]
        # Another text that begins alike, and the same text before another chunk.
        alike = Prompt([Text(token_ids=(*ids(Prompt([system]))[:BLOCK], *tokens(40, 7))), one, question])
        assert ask(rag, alike) == (bare("llama", alike), BLOCK)
        assert ask(rag, Prompt([system, chunk(30, 13), question]))[1] == 2 * BLOCK + 5
        # And a prompt without chunks shares the blocks.
        assert ask(rag, Prompt([system]))[1] == 2 * BLOCK


LONG = "The river Spree flows in Berlin, the river Seine in Paris and the river Tiber in Rome. " * 3
CHAT = [{"role": "system", "content": LONG}, {"role": "user", "content": "Where does the river flow?"}]


def test_chats_answer_what_the_bare_model_answers() -> None:
    tokenizer, model = byte_level(), speaker()

    def bare(messages: Any) -> tuple[int, ...]:
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        out = model.generate(given, max_new_tokens=5, do_sample=False)
        return given.shape[1], tuple(out[0, given.shape[1] :].tolist())

    with engine(tree=TreeConfig()) as rag:
        for turn in range(3):
            length, expected = bare(CHAT)
            token_ids, reused = ask(rag, CHAT)
            assert token_ids == expected
            assert reused == (length // BLOCK * BLOCK if turn else 0)
        said = rag.generate(CHAT, **ASKED).text
        longer = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": "And Rome?"}]
        expected_tokens, reused = ask(rag, longer)
        assert expected_tokens == bare(longer)[1]
        assert reused >= length // BLOCK * BLOCK - BLOCK


def test_the_report_says_why_nothing_was_reused() -> None:
    short = Prompt([text(BLOCK - 1, 1)])

    def reason(rag: RagCache, prompt: Prompt, **options: Any) -> str:
        report = rag.generate(prompt, **{**ASKED, **options}).report.link
        assert (report.miss_reason != "") == (report.reused_tokens == 0)
        assert report.miss_reason in str(report)
        return report.miss_reason

    with rag_for("llama", policy="reuse", tree=tree_of()) as rag:
        assert "first request with this beginning" in reason(rag, PLAIN)
        assert reason(rag, PLAIN) == ""
        assert f"block of {BLOCK}" in reason(rag, short)
        assert "policy full" in reason(rag, PLAIN, policy="full")
        with torch.no_grad():
            next(iter(rag.model.parameters())).add_(0)
        assert "the model changed" in reason(rag, PLAIN)
    with rag_for("llama", policy="reuse") as rag:
        assert "no tree" in reason(rag, PLAIN)
