"""``rag.link``: a cache for a generate call or a loop of the user's own."""

import pytest
import torch

from engine_kit import EXACT, PROMPT, chunk, ids, text, warmed
from families import EACH, greedy, off, plain, prefill
from ragcachekit import Prompt
from ragcachekit.errors import LinkedPromptUsed
from soak_kit import soaked

ENDS_WITH_A_CHUNK = Prompt([text(9, 1), chunk(25, 3)])
ONE_CHUNK = Prompt([chunk(25, 3)])
ONE_TOKEN = Prompt([chunk(1, 5)])
PROMPTS = [ENDS_WITH_A_CHUNK, ONE_CHUNK, ONE_TOKEN]


@pytest.mark.parametrize("name", EACH)
def test_models_generate_on_a_linked_prompt_is_rags(name):
    rag = warmed(name, PROMPT, policy="lego:4")
    linked = rag.link(PROMPT)
    assert tuple(linked.input_ids[0].tolist()) == ids(PROMPT)
    assert linked.report.reused_tokens == 59
    out = rag.model.generate(**linked.inputs, max_new_tokens=10, do_sample=False)
    assert tuple(out[0, : len(ids(PROMPT))].tolist()) == ids(PROMPT)
    answer = rag.generate(PROMPT, max_new_tokens=10, do_sample=False)
    assert tuple(out[0, len(ids(PROMPT)) :].tolist()) == answer.token_ids


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-longrope"])
def test_a_loop_of_ones_own_over_the_cache(name):
    rag = warmed(name, EXACT, policy="reuse", encoder="system")
    cache, sequence = rag.link(EXACT).cache, list(ids(EXACT))
    assert cache.get_seq_length() == len(sequence) - 1
    for _ in range(5):
        at = len(sequence) - 1
        with torch.no_grad():
            logits = rag.model(
                input_ids=torch.tensor([sequence[-1:]]),
                position_ids=torch.tensor([[at]]),
                past_key_values=cache,
            ).logits[0, -1]
        if not (name == "phi3-longrope" and len(sequence) > 64):
            assert off(logits, prefill(plain(name), sequence).logits[-1]) <= 1e-5
        sequence.append(int(logits.argmax()))
    assert tuple(sequence[-5:]) == greedy(plain(name), ids(EXACT), 5)


def test_used_twice():
    rag = warmed("llama", PROMPT)
    linked = rag.link(PROMPT)
    rag.model.generate(**linked.inputs, max_new_tokens=2)
    with pytest.raises(LinkedPromptUsed, match=r"call rag\.link"):
        _ = linked.inputs
    with pytest.raises(LinkedPromptUsed):
        _ = linked.cache


def test_two_links_share_nothing_that_is_written():
    rag = warmed("llama", PROMPT, policy="reuse")
    first, second = rag.link(PROMPT), rag.link(PROMPT)
    one = rag.model.generate(**first.inputs, max_new_tokens=8, do_sample=False)
    two = rag.model.generate(**second.inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(one, two)


def test_beams_and_several_sequences_over_a_repeated_cache():
    rag = warmed("llama", EXACT, policy="reuse", encoder="system")
    inputs = rag.link(EXACT).inputs
    inputs["past_key_values"].batch_repeat_interleave(3)
    out = rag.model.generate(**inputs, num_beams=3, num_return_sequences=3, max_new_tokens=6)
    batch = torch.tensor([ids(EXACT)])
    want = plain("llama").generate(
        batch,
        attention_mask=torch.ones_like(batch),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=6,
    )
    assert torch.equal(out, want)


@pytest.mark.parametrize("prompt", soaked(PROMPTS, *PROMPTS[::2]))
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("llama", {}), ("llama", {"num_beams": 2}), ("llama", {"no_repeat_ngram_size": 3})),
        *(("mistral-sliding", {}), ("gpt-oss", {"num_beams": 2})),
    ],
)
def test_a_prompt_that_ends_with_a_cached_chunk(name, prompt, way):
    rag = warmed(name, prompt, policy="reuse", encoder="system")
    answer = rag.generate(prompt, max_new_tokens=6, do_sample=False, **way)
    link, count = answer.report.link, len(ids(prompt))
    assert (link.exact_tokens, link.recomputed_tokens, link.computed_tokens) == (count - 1, 1, 0)
    assert answer.token_ids == greedy(plain(name), ids(prompt), 6, **way)
    out = rag.model.generate(**rag.link(prompt).inputs, max_new_tokens=6, do_sample=False, **{})
    assert tuple(out[0, count:].tolist()) == greedy(plain(name), ids(prompt), 6)
