"""Unknown and unsupported options are refused at the call, before any work, whatever the call."""

from __future__ import annotations

import asyncio
import logging

import pytest
import transformers as tf

from engine_kit import FOLDER
from ragcachekit import Observer, QueueConfig, RagCache, agenerate, astream
from ragcachekit.errors import GenerationNotSupported
from ragcachekit.generate.options import check_options
from speaking import byte_level, speaker

PROMPT = "Where does the river flow? Answer from the context."


@pytest.fixture(scope="module")
def rag():
    options = {"policy": "reuse", "cold": "now", "queue": QueueConfig(max_waiting=2)}
    with RagCache(speaker(), byte_level(), cache_dir=FOLDER.name, **options) as rag:
        rag.encode(["Answer from the context."])
        rag.submit(PROMPT, max_new_tokens=2).result(60)
        yield rag


async def streamed(rag, **options):
    async for _ in astream(rag, PROMPT, **options):
        pass


CALLS = {
    "generate": lambda rag, **options: rag.generate(PROMPT, **options),
    "stream": lambda rag, **options: rag.stream(PROMPT, **options),
    "submit": lambda rag, **options: rag.submit(PROMPT, **options),
    "generate_batch": lambda rag, **options: rag.generate_batch([PROMPT, PROMPT], **options),
    "agenerate": lambda rag, **options: asyncio.run(agenerate(rag, PROMPT, **options)),
    "astream": lambda rag, **options: asyncio.run(streamed(rag, **options)),
}
REFUSED = [
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


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("call", CALLS)
def test_refused_before_any_work(rag, call, options, kind, message, caplog):
    forwards, noting, before = [], Noting(), rag.queue.stats()
    hook = rag.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    rag.add_observer(noting)
    try:
        with caplog.at_level(logging.DEBUG, "ragcachekit"), pytest.raises(kind, match=message):
            CALLS[call](rag, **options)
        rag.queue.drain(60)
    finally:
        hook.remove()
        rag.remove_observer(noting)
    assert rag.queue.stats() == before
    assert (forwards, noting.started, caplog.records) == ([], 0, [])


@pytest.mark.parametrize("call", ["stream", "astream", "submit"])
def test_a_streamer_and_beams(rag, call):
    streamer = {"streamer": object()} if call == "submit" else {}
    with pytest.raises(ValueError, match="num_beams"):
        CALLS[call](rag, num_beams=2, **streamer)


@pytest.mark.parametrize(
    "name",
    [
        *("max_new_tokens", "do_sample", "bad_words_ids", "stop_strings", "eos_token_id", "top_h"),
        *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "tokenizer"),
        *("labels", "logits_to_keep", "output_router_logits", "seed", "max_tokens"),
    ],
)
def test_known_is_what_generate_and_the_models_forward_take(rag, name):
    check_options({name: 0}, rag.model)


@pytest.mark.parametrize("name", ["n", "temprature", "best_of", "stop", "update", "kwarg"])
def test_unknown_is_what_transformers_refuses(rag, name):
    ids = rag.tokenizer("the river", return_tensors="pt")["input_ids"]
    if name != "update":  # a method of GenerationConfig, which transformers takes for an option
        with pytest.raises(ValueError, match="not used by the model"):
            rag.model.generate(ids, max_new_tokens=1, **{name: 1})
    with pytest.raises(ValueError, match=f"{name}="):
        check_options({name: 1}, rag.model)
    check_options({name: None}, rag.model)  # as transformers
