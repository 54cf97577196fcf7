"""Models whose attention depends on positions after a threshold: prompts are linked up to there."""

import pytest
import torch
import transformers as tf

from engine_kit import RecordingStore, bare, chunk, text, warmed
from families import BY_POSITION, SIZES, THRESHOLD, build, sharpened, wrapped
from ragcachekit import ModelNotSupported, Prompt
from ragcachekit.engine.grade import admit
from ragcachekit.model.rope import describe_rope

CHUNKS = chunk(40, 2), chunk(33, 3)
WITHIN = Prompt([text(9, 1), *CHUNKS, text(THRESHOLD - 82, 4)])
BEYOND = Prompt([text(9, 1), *CHUNKS, text(THRESHOLD - 81, 4)])
EVERYTHING = f"lego:{THRESHOLD}"
ANSWER = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(params=BY_POSITION)
def name(request):
    return request.param


def test_the_threshold_is_the_models_own(name):
    assert describe_rope(wrapped(name)).exact_up_to == THRESHOLD


def test_a_prompt_up_to_the_threshold_is_linked(name):
    with warmed(name, WITHIN) as rag:
        report = rag.generate(WITHIN, **ANSWER).report.link
    assert report.fallback is None
    assert report.approximate_tokens > 0


def test_a_longer_prompt_is_computed_in_full(name):
    with warmed(name, WITHIN) as rag:
        answer = rag.generate(BEYOND, **ANSWER)
    assert f"beyond {THRESHOLD} the model's attention depends on positions" in answer.report.link.fallback
    assert answer.report.link.reused_tokens == 0
    assert answer.token_ids == bare(name, BEYOND, 12)


def test_an_answer_may_pass_the_threshold(name):
    """Everything recomputed is the ordinary prefill; the model's own steps follow, with its own masks."""
    with warmed(name, WITHIN) as rag:
        answer = rag.generate(WITHIN, policy=EVERYTHING, **ANSWER)
        assert answer.report.link.fallback is None
        assert answer.token_ids == bare(name, WITHIN, 12)


def test_answers_together_are_those_alone(name):
    """Llama 4 counts positions by its cache, which knows only the longest request's."""
    short = Prompt([text(9, 1), *CHUNKS, text(7, 5)])
    prompts = [WITHIN, short, BEYOND, short]
    with warmed(name, WITHIN) as rag:
        requests = [rag.submit(prompt, policy=EVERYTHING, **ANSWER) for prompt in prompts]
        answers = [request.result() for request in requests]
    assert [answer.token_ids for answer in answers] == [bare(name, prompt, 12) for prompt in prompts]
    assert answers[1].report.batch == 2
    assert answers[0].report.batch == 1


def test_stored_chunks_stay_as_they_were(name):
    store = RecordingStore()
    with warmed(name, WITHIN, store=store) as rag:
        for prompt in (WITHIN, BEYOND):
            rag.generate(prompt, **ANSWER)
    assert store.originals
    assert store.unchanged()


def test_a_threshold_too_low_for_the_check_is_a_refusal():
    model = build("llama4", attention_chunk_size=32)
    with pytest.raises(ModelNotSupported, match="beyond 32 the model's attention depends on positions"):
        admit(model, describe_rope(model))


def test_a_window_of_the_cache_alone_must_be_as_long_as_the_context():
    """Moshi's cache forgets keys that its attention would see; the check's prompt is shorter than that."""

    def checked(window):
        torch.manual_seed(0)
        config = tf.MoshiConfig(
            **{**SIZES, "num_key_value_heads": 4, "head_dim": 16, "ffn_dim": 96, "sliding_window": window}
        )
        model = sharpened(tf.MoshiForCausalLM(config))
        return admit(model, describe_rope(model))

    assert 0 < checked(SIZES["max_position_embeddings"]) < 1e-5
    with pytest.raises(ModelNotSupported, match="drops keys after 200 tokens"):
        checked(200)


def test_a_model_may_not_hide_its_threshold():
    """The check runs a chunk at the end of what is allowed."""
    rope = describe_rope(build("ministral3"))
    rope.exact_up_to = rope.context
    with pytest.raises(ModelNotSupported, match="attention depends on positions"):
        admit(build("ministral3"), rope)
