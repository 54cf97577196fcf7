"""What one request may cost: its parsing, its tokenisation, its chunks, and what a key is charged for it."""

import json

import httpx
import pytest
from pydantic import ValidationError

from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server.context_routes import NewContext
from ragcachekit.server.keys import Grant, Limits, add_key
from ragcachekit.server.schemas import ChatRequest, TextRequest
from server_kit import LONG, MODEL, QUESTION, served, until

MANY = 100_000
USER = {"role": "user", "content": QUESTION}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (TextRequest, "prompt", [1.5] * MANY),
        (TextRequest, "prompt", ["a", *[1] * MANY]),
        (TextRequest, "prompt", [[1], *[["a"] * MANY] * 3]),
        (TextRequest, "prompt", [1] * (2**20 + 1)),
        (TextRequest, "documents", [1] * MANY),
        (TextRequest, "stop", [1] * MANY),
        (ChatRequest, "messages", [{"role": "user", "content": [1] * MANY}]),
        (ChatRequest, "tools", [1] * MANY),
        (NewContext, "contents", [{"parts": [1] * MANY}]),
    ],
)
def test_a_list_has_one_error_however_many_items_are_wrong(kind, field, value):
    body = {"model": "m", "messages": [USER], "prompt": "a", "contents": [], field: value}
    known = {info.alias or name for name, info in kind.model_fields.items()}
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(json.dumps({name: body[name] for name in body if name in known}))
    assert error.value.error_count() <= 4  # for a union one of each member


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(1.5, "prompt"), ([1.5], "prompt[0]"), ([1, "a"], "prompt[1]"), ([[1], [1, 2.5]], "prompt[1][1]")],
)
def test_the_error_of_a_prompt_names_its_place(url, prompt, param):
    error = httpx.post(url + TEXT, json={"model": MODEL, "prompt": prompt}).json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_type")


def test_a_prompt_of_too_many_characters_is_refused_before_it_is_tokenised(url, rag, monkeypatch):
    monkeypatch.setattr(rag, "submit", lambda *_, **__: pytest.fail("was submitted"))
    context = rag.model.config.max_position_embeddings
    longest = max(map(len, rag.tokenizer.get_vocab()))
    for path, asked in ((CHAT, {"messages": [{**USER, "content": "a" * (context * longest + 1)}]}),
                        (TEXT, {"prompt": "a" * (context * longest + 1)}),
                        (TEXT, {"prompt": "a", "documents": ["a" * context] * (longest + 1)})):  # fmt: skip
        response = httpx.post(url + path, json={"model": MODEL, **asked}, timeout=LONG)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_of_too_many_chunks_is_refused(url):
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    asked = {"model": MODEL, "documents": ["b"] * 1000, "max_tokens": 1}
    messages = [{"role": "user", "content": [marked] * 25}]
    for path, more in ((CHAT, {"messages": messages}), (TEXT, {"prompt": "a", "documents": ["a"] * 1025})):
        response = httpx.post(url + path, json={**asked, **more}, timeout=LONG)
        assert response.status_code == 400
        assert "at most 1024 documents" in response.json()["error"]["message"]


@pytest.fixture
def tenants(rag, tmp_path):
    """An address and two keys, with few tokens for the first."""
    file = tmp_path / "keys.json"
    keys = add_key(file, "a", limits=Limits(tokens_per_minute=10_000, parallel=4)), add_key(file, "b")
    with served(create_app(rag, ServerConfig(model_name=MODEL, keys=file, heartbeat=0.05))) as url:
        yield url, *keys


def asked(url, key, **changes):
    body = {"model": MODEL, "messages": [USER], "max_tokens": 4, "temperature": 0, **changes}
    return httpx.post(url + CHAT, json=body, headers={"X-API-Key": key}, timeout=LONG)


@pytest.fixture
def charged(monkeypatch):
    """What grants were charged: first announced, at last computed."""
    tokens, charge = [], Grant.charge
    monkeypatch.setattr(Grant, "charge", lambda self, n: (tokens.append(n), charge(self, n))[1])
    return tokens


def test_every_copy_of_a_prompt_is_charged(tenants, charged):
    url, key, _ = tenants
    usage = asked(url, key, n=3).json()["usage"]
    assert charged[-1] == 3 * usage["prompt_tokens"] + usage["completion_tokens"]


def test_token_ids_count_before_they_are_computed(tenants, charged):
    url, key, _ = tenants
    body = {"model": MODEL, "prompt": [3] * 12_000, "max_tokens": 1}
    refused = httpx.post(url + TEXT, json=body, headers={"X-API-Key": key}, timeout=LONG)
    assert (refused.status_code, charged) == (429, [])


def test_a_stream_is_charged_what_was_generated_also_when_it_is_left(tenants, charged):
    url, key, _ = tenants
    whole = asked(url, key, max_tokens=100, n=2)
    expected, once = charged[-1], whole.json()["usage"]["prompt_tokens"]
    assert asked(url, key, max_tokens=100, n=2, stream=True).status_code == 200
    until(lambda: len(charged) == 4)
    assert charged[1::2] == [expected] * 2
    del charged[:]
    body = {"model": MODEL, "messages": [USER], "max_tokens": 400, "temperature": 0, "stream": True}
    with httpx.stream("POST", url + CHAT, json=body, headers={"X-API-Key": key}, timeout=LONG) as response:
        lines = response.iter_lines()
        for _ in range(3):
            next(line for line in lines if "content" in line)
    until(lambda: len(charged) > 1)
    assert once < charged[-1] <= once + 400


def test_bad_bodies_count_as_requests(rag, tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, "a", limits=Limits(requests_per_minute=2))
    with served(create_app(rag, ServerConfig(model_name=MODEL, keys=file))) as url:
        statuses = [
            httpx.post(url + TEXT, json={"n": "x"}, headers={"X-API-Key": key}).status_code for _ in range(3)
        ]
    assert statuses == [400, 400, 429]


def test_the_coldest_temperatures_are_greedy(url):
    answers = [asked(url, "", temperature=cold).json() for cold in (0, 1e-40, 5e-4)]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
