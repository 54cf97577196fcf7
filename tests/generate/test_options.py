"""What cannot work with a linked prompt is refused, and what the model's own defaults say is not."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from transformers import DynamicCache

from engine_kit import EXACT, PROMPT, ids, rag_for
from families import build, greedy, plain
from ragcachekit import RagCache
from ragcachekit.errors import GenerationNotSupported

REFUSED = {
    "assistant_model": object(),
    "prompt_lookup_num_tokens": 3,
    "guidance_scale": 1.5,
    "cache_implementation": "static",
    "use_cache": False,
    "past_key_values": DynamicCache(),
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "custom_generate": lambda *_: None,
    "prefill_chunk_size": 8,
    "input_ids": torch.tensor([[4, 5]]),
    "inputs": torch.tensor([[4]]),
    "inputs_embeds": torch.zeros(1, 3, 64),
    "attention_mask": torch.ones(1, 4),
    "position_ids": torch.zeros(1, 1),
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "num_return_sequences": 2,
}


@pytest.fixture
def rag():
    return rag_for("llama")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_the_reason(rag, name):
    with pytest.raises(GenerationNotSupported, match=f"^{name}=.+"):
        rag.generate(PROMPT, max_new_tokens=2, **{name: REFUSED[name]})
    with pytest.raises(GenerationNotSupported, match=f"^{name}=.+"):
        rag.generate_batch([PROMPT], max_new_tokens=2, **{name: REFUSED[name]})


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "num_return_sequences", "output_scores"])
def test_refused_in_a_configuration_of_the_users_own_too(rag, name):
    config = tf.GenerationConfig()
    setattr(config, name, REFUSED[name])
    with pytest.raises(GenerationNotSupported, match=f"^{name}="):
        rag.generate(PROMPT, generation_config=config)


@pytest.mark.parametrize(
    "harmless",
    [
        {"num_return_sequences": 1},
        {"guidance_scale": 1.0},
        {"guidance_scale": None},
        {"output_scores": False},
        {"use_cache": True},
        {"prompt_lookup_num_tokens": None},
        {"num_beams": 1},
        {"max_new_tokens": None, "max_length": 77},
        {"generation_config": None},
    ],
)
def test_the_neutral_value_is_fine(rag, harmless):
    answer = rag.generate(PROMPT, **{"max_new_tokens": 4, **harmless})
    assert answer.token_ids == greedy(plain("llama"), ids(PROMPT), 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_implementation", "hybrid"),
        ("cache_implementation", "static"),
        ("use_cache", False),
        ("return_dict_in_generate", True),
        ("output_scores", True),
        ("num_return_sequences", 2),
    ],
)
def test_what_the_model_ships_with_is_put_aside(tmp_path, name, value):
    model = build("llama")
    setattr(model.generation_config, name, value)
    if name == "num_return_sequences":
        model.generation_config.do_sample = True
    rag = RagCache(model, cache_dir=tmp_path, cold="now", policy="reuse", encoder="system")
    for _ in range(2):
        answer = rag.generate(EXACT, max_new_tokens=5, do_sample=False)
        assert answer.token_ids == greedy(plain("llama"), ids(EXACT), 5)
    assert answer.report.link.exact_tokens == 49


@pytest.mark.parametrize("count", [0, -1])
def test_no_new_tokens_is_an_error(rag, count):
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        rag.generate(PROMPT, max_new_tokens=count)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        rag.generate(PROMPT, max_length=len(ids(PROMPT)) + count)


def test_stop_strings_need_a_tokenizer(rag):
    with pytest.raises(ValueError, match="tokenizer"):
        rag.generate(PROMPT, stop=["x"])
    with pytest.raises(ValueError, match="tokenizer"):
        rag.stream(PROMPT)


def test_a_default_of_the_model_that_reads_the_prompts_order(tmp_path):
    model = build("llama")
    model.generation_config.no_repeat_ngram_size = 2
    with RagCache(model, cache_dir=tmp_path, cold="now", policy="reuse", encoder="system") as rag:
        rag.generate(EXACT, max_new_tokens=1)
        answer = rag.generate(EXACT, max_new_tokens=15, do_sample=False)
    assert answer.report.link.exact_tokens == 49
    assert answer.token_ids == greedy(plain("llama"), ids(EXACT), 15, no_repeat_ngram_size=2)
