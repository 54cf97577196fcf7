"""The server on a hybrid: answers as bare generate, streams, contexts, usage, many clients at once."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from engine_kit import FOLDER
from ragcachekit import RagCache
from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server.keys import add_key
from ragcachekit.telemetry import PrometheusObserver
from server_kit import DOCUMENTS, LONG, MODEL, QUESTION, served
from snapshots_kit import hybrid_speaker
from speaking import byte_level

CHAT, CONTEXTS = "/v1/chat/completions", "/v1beta/cachedContents"
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def rag():
    with RagCache(hybrid_speaker(), byte_level(), cache_dir=FOLDER.name, cold="now") as rag:
        assert rag.grade == "prefix"
        yield rag


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("server") / "keys.json"
    return file, {name: add_key(file, name) for name in ("ada", "bob")}


@pytest.fixture(scope="module")
def url(rag, keys):
    app = create_app(rag, ServerConfig(MODEL, keys=keys[0]), metrics=PrometheusObserver(rag).render)
    with served(app) as url:
        yield url


@pytest.fixture
def client_of(url, keys):
    opened = []

    def client(name):
        headers = {"Authorization": f"Bearer {keys[1][name]}"}
        opened.append(httpx.Client(base_url=url, timeout=LONG, headers=headers))
        return opened[-1]

    yield client
    for one in opened:
        one.close()


def body(*documents, **changes):
    messages = [{"role": "user", "content": QUESTION}]
    base = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0}
    return {**base, "documents": documents, **changes}


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def made(client, texts, system=None):
    parts = [{"text": text} for text in texts]
    given = {"model": MODEL, "contents": [{"parts": parts}], "ttl": "60s"}
    if system:
        given["systemInstruction"] = {"parts": [{"text": system}]}
    answer = client.post(CONTEXTS, json=given)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("system", ["Answer from the context.", None])
def test_the_whole_of_a_context_is_cached_from_the_first_request_on(client_of, rag, system):
    ada, bob = client_of("ada"), client_of("bob")
    texts = [f"Context {number} {system}: {text}" for number in range(4) for text in DOCUMENTS]  # two turns
    context = made(ada, texts, system)
    asked = body(cached_content=context["name"])
    one, two = (ada.post(CHAT, json=asked).json() for _ in range(2))
    assert one["choices"][0]["message"] == two["choices"][0]["message"]
    assert context["usageMetadata"]["totalTokenCount"] <= cached(one) <= cached(two)
    some = ada.post(CHAT, json={**asked, "chunk_ids": context["chunkIds"][:3]}).json()
    assert sum(map(len, texts[:2])) / 4 < cached(some) < cached(one), "its beginning is that of the whole"
    named = {"id": rag.encode(texts[:1], namespace="ada")[0], "chunk": True}
    prompts = [[{"role": "user", "content": [chunk, " Why?"]}] for chunk in (named, texts[0])]
    assert len({rag.link(prompt, namespace="ada").report.prompt_tokens for prompt in prompts}) == 1
    assert bob.post(CHAT, json=asked).status_code == 404
    assert ada.delete(f"/v1beta/{context['name']}").status_code == 200
    assert ada.post(CHAT, json=asked).status_code == 404
    assert cached(ada.post(CHAT, json=body(*texts)).json()) < 10


def test_a_context_that_no_prompt_can_hold_is_cached_as_far_as_one_can(client_of, rag):
    ada = client_of("ada")
    texts = [f"Long context {number}: {text}" for number in range(10) for text in DOCUMENTS]
    context = made(ada, texts)
    assert context["usageMetadata"]["totalTokenCount"] > rag.model.config.max_position_embeddings
    first = body(cached_content=context["name"], chunk_ids=context["chunkIds"][:8])
    assert cached(ada.post(CHAT, json=first).json()) > 100
    assert ada.post(CHAT, json=body(cached_content=context["name"])).status_code == 400


@pytest.mark.parametrize("count", [12, pytest.param(32, marks=pytest.mark.soak)])
def test_many_clients_get_what_bare_generate_answers(client_of, rag, count):
    draw, want = random.Random(1), {}
    asked = [draw.sample(DOCUMENTS, draw.randint(1, 3)) for _ in range(count)]
    for documents in asked:
        text = rag.generate(spoken(documents), policy="full", **GREEDY).text
        want[tuple(documents)] = text
    clients = [client_of(draw.choice(("ada", "bob"))) for _ in asked]

    def ask(pair):
        return pair[0].post(CHAT, json=body(*pair[1])).json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(count) as pool:
        got = list(pool.map(ask, zip(clients, asked, strict=True)))
    assert got == [want[tuple(documents)] for documents in asked]
    requests = [rag.submit(spoken(documents), **GREEDY) for documents in asked]
    assert [request.result(LONG).text for request in requests] == got
    metrics = clients[0].get("/metrics")
    assert metrics.status_code == 200
    assert "ragcachekit" in metrics.text
    assert 'tier="tree:host"' in metrics.text


def spoken(documents):
    return [{"role": "user", "content": "\n\n".join([*documents, QUESTION])}]
