"""Chunk ids of requests, read without a model: as the engine computes them."""

from __future__ import annotations

import json

import pytest

from cluster_kit import SYSTEM
from ragcachekit import RagCache
from ragcachekit.cluster.ingress import ChunkReader
from ragcachekit.server.keys import Tenant
from speaking import byte_level, speaker

NAME = "cachedContents/" + "0123456789abcdef" * 2
TEXTS = ["The river Spree flows in Berlin.", "Paris is the capital of France. ", "Rome"]


@pytest.fixture
def reader():
    tenant = Tenant("one", "default")
    return ChunkReader(byte_level(), lambda _, body: tenant.partition(body.get("cache_salt")))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with RagCache(
        speaker(), byte_level(), cold="now", encoder="system", policy="lego:4",
        cache_dir=tmp_path_factory.mktemp("digests"),
    ) as rag:  # fmt: skip
        yield rag


def read(reader, body, **headers):
    return reader.chunks(headers, json.dumps(body).encode())


def test_documents_have_the_engine_s_ids(reader, engine):
    ids = engine.encode(TEXTS, system=SYSTEM)
    found = read(reader, {"documents": [TEXTS[0], {"text": TEXTS[1]}, {"id": "3", "text": TEXTS[2]}]})
    assert list(found) == ids
    assert set(ids) <= engine.chunks_in_memory()
    assert found[ids[0]] == engine.count_tokens(TEXTS[0])


def test_titles_belong_to_their_documents(reader, engine):
    ids = engine.encode(["Germany\nBerlin is a town."], system=SYSTEM)
    assert list(read(reader, {"documents": [{"title": "Germany", "text": "Berlin is a town."}]})) == ids


def test_marked_parts_are_chunks(reader, engine):
    ids = engine.encode(TEXTS[:2], system=SYSTEM)
    parts = [
        {"type": "text", "text": TEXTS[0], "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "not this one"},
        {"type": "text", "text": TEXTS[1], "prompt_cache_breakpoint": True},
    ]
    messages = [{"role": "system", "content": "Nor this."}, {"role": "user", "content": parts}]
    assert list(read(reader, {"messages": messages})) == ids


def test_partitions_have_ids_of_their_own(reader):
    plain, salted = (read(reader, {"documents": TEXTS, "cache_salt": salt}) for salt in (None, "mine"))
    assert len(plain) == len(salted) == 3
    assert not plain.keys() & salted.keys()


@pytest.mark.parametrize("field", ["cached_content", "cachedContent"])
def test_ids_and_names_that_clients_give(reader, field):
    body = {"chunk_ids": ["one", " two "], field: NAME}
    found = read(reader, body, **{"x-ragcachekit-chunks": "three, four,,"})
    assert set(found) == {"one", "two", "three", "four", NAME}


@pytest.mark.parametrize("wrong", [NAME + "0", "a/b", "x" * 129])
def test_what_is_no_id_or_name_is_not_read(reader, wrong):
    body = {"chunk_ids": [wrong, NAME, "one"], "cached_content": wrong}
    assert set(read(reader, body, **{"x-ragcachekit-chunks": f"{wrong},{NAME},two"})) == {"one", "two"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null", b'{"documents": 3}', b'{"documents": [3]}',
        b'{"documents": [{"title": 3}]}', b'{"messages": [3]}', b'{"messages": {"a": 1}}',
        b'{"chunk_ids": 3}', b'{"messages": [{"content": [3]}]}',
        b'{"chunk_ids": [3, null, ""]}', b'{"cached_content": 3}',
    ],
)  # fmt: skip
def test_what_is_no_request_has_no_chunks(reader, body):
    assert reader.chunks({}, body) == {}


def test_an_unknown_key_has_no_chunks():
    def refuse(headers, _):
        raise PermissionError(headers)

    assert read(ChunkReader(byte_level(), refuse), {"documents": TEXTS}) == {}


def test_their_number_is_bounded(reader):
    assert len(read(reader, {"documents": [f"Document {n}" for n in range(1000)]})) == 256
    assert len(read(reader, {"chunk_ids": [str(n) for n in range(1000)]})) == 256
