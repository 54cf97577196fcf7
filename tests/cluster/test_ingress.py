"""What the ingress reads of a request, as the engine computes it, and what it passes on."""

import json

import pytest

from cluster_kit import SYSTEM
from ragcachekit import RagCache
from ragcachekit.cluster.app import ChunkReader, Ingress
from ragcachekit.server.keys import ApiKeys, Tenant
from speaking import byte_level, speaker

NAME = "cachedContents/" + "0123456789abcdef" * 2
TEXTS = ["The river Spree flows in Berlin.", "Paris is the capital of France. ", "Rome"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def reader():
    return ChunkReader(byte_level())


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with RagCache(
        speaker(), byte_level(), cold="now", encoder="system", policy="lego:4",
        cache_dir=tmp_path_factory.mktemp("digests"),
    ) as rag:  # fmt: skip
        yield rag


def read(reader, path=TEXT, namespace="default", **body):
    body = {"model": "m", "prompt": "Where?", **body} if path == TEXT else {"model": "m", **body}
    return reader.chunks(Tenant("one", namespace), path, json.dumps(body).encode())


def test_documents_have_the_engine_s_ids(reader, engine):
    ids = engine.encode(TEXTS, system=SYSTEM)
    found = read(reader, documents=[TEXTS[0], {"text": TEXTS[1]}, {"id": "3", "text": TEXTS[2]}])
    assert list(found) == ids
    assert set(ids) <= engine.chunks_in_memory()
    assert found[ids[0]] == engine.count_tokens(TEXTS[0])
    (titled,) = engine.encode(["Germany\nBerlin is a town."], system=SYSTEM)
    assert list(read(reader, documents=[{"title": "Germany", "text": "Berlin is a town."}])) == [titled]


def test_marked_parts_are_chunks(reader, engine):
    ids = engine.encode(TEXTS[:2], system=SYSTEM)
    parts = [
        {"type": "text", "text": TEXTS[0], "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "not this one"},
        {"type": "text", "text": TEXTS[1], "prompt_cache_breakpoint": True},
    ]
    messages = [{"role": "system", "content": "Nor this."}, {"role": "user", "content": parts}]
    assert list(read(reader, CHAT, messages=messages)) == ids
    assert list(read(reader, "/v1/responses", input=messages)) == ids
    system, user = [parts[0]], [{"role": "user", "content": [parts[1]]}]
    assert list(read(reader, "/v1/messages", max_tokens=1, system=system, messages=user)) == ids[:1]


def test_namespaces_and_partitions_have_ids_of_their_own(reader):
    found = [
        read(reader, documents=TEXTS, **own) for own in ({}, {"cache_salt": "mine"}, {"namespace": "other"})
    ]
    assert len({one for ids in found for one in ids}) == 9


@pytest.mark.parametrize("field", ["cached_content", "cachedContent"])
def test_ids_and_names_that_clients_give(reader, field):
    assert set(read(reader, chunk_ids=["one", "two"], **{field: NAME})) == {"one", "two", NAME}


@pytest.mark.parametrize("body", [b"", b"[" * 100_000, b"null", b'{"documents": [3]}', b'{"messages": 3}'])
def test_what_is_no_request_has_no_chunks(reader, body):
    for path in (CHAT, TEXT, "/v1/models"):
        assert reader.chunks(Tenant("one", "one"), path, body) == {}


def test_their_number_is_bounded(reader):
    assert len(read(reader, documents=[f"Document {n}" for n in range(1000)])) == 256
    assert len(read(reader, chunk_ids=[str(n) for n in range(1000)], documents=TEXTS)) == 256


BODY = b'{"documents": ["Rome"]}'


class Replicas:
    """Notes what it is sent, and answers 200."""

    def __init__(self):
        self.bodies = []

    def options(self, **_):
        return self

    def remote(self, scope, body, chunks):
        self.bodies.append(body)

        async def messages():
            yield {"type": "http.response.start", "status": 200, "headers": []}
            yield {"type": "http.response.body", "body": b"{}"}

        return messages()


async def ask(reader, path, root_path="", has_contexts=True):
    """Status, JSON, and the bodies that reached a replica."""
    replicas = Replicas()
    (application, *_) = Ingress.__bases__  # without what Serve adds
    ingress = application(
        replicas, lambda: (reader, ApiKeys(None, Tenant("all", "public"))), 1000, has_contexts
    )
    arriving = iter([{"type": "http.request", "body": BODY, "more_body": False}])
    sent = []

    async def receive():
        return next(arriving, {"type": "http.disconnect"})

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": root_path + path, "root_path": root_path, "headers": [],
    }  # fmt: skip
    await ingress.answer(scope, receive, send)
    text = b"".join(one.get("body", b"") for one in sent)
    return sent[0]["status"], json.loads(text), replicas.bodies


@pytest.mark.parametrize("root_path", ["", "/llm", "/v1beta"])
async def test_a_body_arrives_wherever_the_application_is_mounted(reader, root_path):
    assert await ask(reader, CHAT, root_path) == (200, {}, [BODY])
    assert await ask(reader, "/v1beta/cachedContents", root_path) == (200, {}, [BODY])


@pytest.mark.parametrize("root_path", ["", "/llm"])
async def test_without_a_common_folder_contexts_are_refused(reader, root_path):
    for path in ("/v1beta/cachedContents", "/v1beta/cachedContents/x"):
        status, body, bodies = await ask(reader, path, root_path, has_contexts=False)
        assert (status, body["error"]["status"], bodies) == (501, "UNIMPLEMENTED", [])
        assert "'contexts'" in body["error"]["message"]
    assert (await ask(reader, CHAT, root_path, has_contexts=False))[2] == [BODY]


async def test_other_paths_have_no_body(reader):
    assert await ask(reader, "/health") == (200, {}, [b""])
