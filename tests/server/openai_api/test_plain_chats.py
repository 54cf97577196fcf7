"""Chats without documents: the server reuses how they begin, exactly, and says why where it cannot."""

import httpx
import pytest
import torch

from ragcachekit import TreeConfig
from ragcachekit.prefix_tree.nodes import BLOCK
from ragcachekit.server import ServerConfig, create_app
from server_kit import LONG, MODEL, engine, served
from speaking import byte_level, speaker

SYSTEM = "The river Spree flows in Berlin, the river Seine in Paris and the river Tiber in Rome. " * 3
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where does the river flow?"}]


@pytest.fixture(scope="module")
def client():
    with (
        engine(tree=TreeConfig()) as rag,
        served(create_app(rag, ServerConfig(model_name=MODEL))) as url,
        httpx.Client(base_url=f"{url}/v1", timeout=LONG) as client,
    ):
        yield client


def ask(client, messages, **body):
    asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 5, **body}
    response = client.post("/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    return response


def bare(messages):
    """Length of the prompt, and the bare model's answer."""
    tokenizer = byte_level()
    given = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    out = speaker().generate(given, attention_mask=torch.ones_like(given), max_new_tokens=5, do_sample=False)
    ids = [token for token in out[0, given.shape[1] :].tolist() if token != tokenizer.eos_token_id]
    return given.shape[1], tokenizer.decode(ids, skip_special_tokens=True)


def cached(response):
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def miss_reason(response):
    return response.json()["usage"]["ragcachekit"]["miss_reason"]


def text_of(response):
    return response.json()["choices"][0]["message"]["content"]


def test_the_same_chat_again_is_nearly_all_cached(client):
    length, answer = bare(CHAT)
    responses = [ask(client, CHAT) for _ in range(3)]
    assert [cached(r) for r in responses] == [0, *[length // BLOCK * BLOCK] * 2]
    assert {text_of(r) for r in responses} == {answer}
    assert "first request with this beginning" in miss_reason(responses[0])
    assert [miss_reason(r) for r in responses[1:]] == [None, None]
    headers = [r.headers["x-ragcachekit-cache"] for r in responses]
    assert headers[0].startswith('miss; reason="first request with this beginning')
    assert headers[1] == f"hit; tokens={length // BLOCK * BLOCK}"


def test_the_next_turn_reuses_the_last_one(client):
    said = text_of(ask(client, CHAT))
    longer = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": "And in Rome?"}]
    response = ask(client, longer)
    assert cached(response) >= bare(CHAT)[0] // BLOCK * BLOCK - BLOCK  # the template may end otherwise
    assert text_of(response) == bare(longer)[1]


def test_the_usage_says_why_nothing_can_be_reused(client):
    reason = miss_reason(ask(client, [{"role": "user", "content": "Hi"}]))
    assert f"shorter than a block of {BLOCK}" in reason
    for options, expected in (({}, "there is no tree"), ({"policy": "full"}, "policy full")):
        with (
            engine(**options) as rag,
            served(create_app(rag, ServerConfig(model_name=MODEL))) as url,
            httpx.Client(base_url=f"{url}/v1", timeout=LONG) as own,
        ):
            assert expected in miss_reason(ask(own, CHAT))
