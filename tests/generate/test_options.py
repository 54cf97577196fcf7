"""Options: what cannot work is refused before any work, and what the model's own defaults say is not."""

import asyncio
import logging

import pytest
import torch
import transformers as tf
from transformers import DynamicCache

from engine_kit import EXACT, FOLDER, PROMPT, checked, ids, rag_for
from families import build, greedy, plain
from ragcachekit import Observer, QueueConfig, RagCache, agenerate, astream
from ragcachekit.errors import GenerationNotSupported
from ragcachekit.generate.options import check_options
from speaking import byte_level, speaker

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
    rag = RagCache(model, cache_dir=checked(tmp_path), cold="now", policy="reuse", encoder="system")
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
    with RagCache(model, cache_dir=checked(tmp_path), cold="now", policy="reuse", encoder="system") as rag:
        rag.generate(EXACT, max_new_tokens=1)
        answer = rag.generate(EXACT, max_new_tokens=15, do_sample=False)
    assert answer.report.link.exact_tokens == 49
    assert answer.token_ids == greedy(plain("llama"), ids(EXACT), 15, no_repeat_ngram_size=2)


QUESTION = "Where does the river flow? Answer from the context."


@pytest.fixture(scope="module")
def talking():
    options = {"policy": "reuse", "cold": "now", "queue": QueueConfig(max_waiting=2)}
    with RagCache(speaker(), byte_level(), cache_dir=FOLDER.name, **options) as talking:
        talking.encode(["Answer from the context."])
        talking.submit(QUESTION, max_new_tokens=2).result(60)
        yield talking


async def streamed(talking, **options):
    async for _ in astream(talking, QUESTION, **options):
        pass


CALLS = {
    "generate": lambda talking, **options: talking.generate(QUESTION, **options),
    "stream": lambda talking, **options: talking.stream(QUESTION, **options),
    "submit": lambda talking, **options: talking.submit(QUESTION, **options),
    "generate_batch": lambda talking, **options: talking.generate_batch([QUESTION, QUESTION], **options),
    "agenerate": lambda talking, **options: asyncio.run(agenerate(talking, QUESTION, **options)),
    "astream": lambda talking, **options: asyncio.run(streamed(talking, **options)),
}
UNKNOWN = [
    ({"n": 2}, ValueError, "n="),
    ({"temprature": 0.5}, ValueError, "temprature= .*temperature="),
    ({"max_new_tokns": 3}, ValueError, "max_new_tokns= .*max_new_tokens="),
    ({"namespce": "a"}, ValueError, "namespce= .*namespace="),
    ({"best_of": 2, "temprature": 1.0}, ValueError, "best_of=.*temprature="),
    ({"num_return_sequences": 2}, GenerationNotSupported, "num_return_sequences="),
    ({"use_cache": False}, GenerationNotSupported, "use_cache="),
    (
        {"generation_config": tf.GenerationConfig(prompt_lookup_num_tokens=3)},
        GenerationNotSupported,
        "lookup",
    ),
    ({"generation_config": {"do_sample": False}}, TypeError, "generation_config"),
]


class Noting(Observer):
    def __init__(self):
        self.started = 0

    def request_started(self, start):
        self.started += 1


@pytest.mark.parametrize(("options", "kind", "message"), UNKNOWN, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("call", CALLS)
def test_refused_before_any_work(talking, call, options, kind, message, caplog):
    forwards, noting, before = [], Noting(), talking.queue.stats()
    hook = talking.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    talking.add_observer(noting)
    try:
        with caplog.at_level(logging.DEBUG, "ragcachekit"), pytest.raises(kind, match=message):
            CALLS[call](talking, **options)
        talking.queue.drain(60)
    finally:
        hook.remove()
        talking.remove_observer(noting)
    assert talking.queue.stats() == before
    assert (forwards, noting.started, caplog.records) == ([], 0, [])


@pytest.mark.parametrize("call", ["stream", "astream", "submit"])
def test_a_streamer_and_beams(talking, call):
    streamer = {"streamer": object()} if call == "submit" else {}
    with pytest.raises(ValueError, match="num_beams"):
        CALLS[call](talking, num_beams=2, **streamer)


@pytest.mark.parametrize(
    "name",
    [
        *("max_new_tokens", "do_sample", "bad_words_ids", "stop_strings", "eos_token_id", "top_h"),
        *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "tokenizer"),
        *("labels", "logits_to_keep", "output_router_logits", "seed", "max_tokens"),
    ],
)
def test_known_is_what_generate_and_the_models_forward_take(talking, name):
    check_options({name: 0}, talking.model)


@pytest.mark.parametrize("name", ["n", "temprature", "best_of", "stop", "update", "kwarg"])
def test_unknown_is_what_transformers_refuses(talking, name):
    ids = talking.tokenizer("the river", return_tensors="pt")["input_ids"]
    if name != "update":  # a method of GenerationConfig, which transformers takes for an option
        with pytest.raises(ValueError, match="not used by the model"):
            talking.model.generate(ids, max_new_tokens=1, **{name: 1})
    with pytest.raises(ValueError, match=f"{name}="):
        check_options({name: 1}, talking.model)
    check_options({name: None}, talking.model)  # as transformers
