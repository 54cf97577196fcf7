"""The whole application with keys: contexts in chats, and tenants that share nothing."""

import asyncio
import random

import httpx
import openai
import pytest
from starlette.applications import Starlette

from engine_kit import stored_in
from ragcachekit import RagCache
from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server.contexts import ContextStore
from ragcachekit.server.keys import add_key
from ragcachekit.types import chunk_id
from speaking import WORDS, byte_level, speaker

ONE = "Berlin is the capital of Germany. The river Spree flows in Berlin."
TWO = "Paris is the capital of France; the river Seine flows in Paris."
URL = "http://test"


@pytest.fixture
async def server(tmp_path):
    """The application in its lifespan, its engine, and clients by tenant."""
    file = tmp_path / "keys.json"
    keys = {name: add_key(file, name) for name in ("ada", "bob")}
    config = ServerConfig(model_name="tiny", keys=file, contexts=tmp_path / "contexts", max_body_bytes=5000)
    with RagCache(
        speaker(), byte_level(), cache_dir=tmp_path, policy="lego:4", encoder="standalone", encode_after=1
    ) as rag:
        app = create_app(rag, config)

        def client(name):
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
            return openai.AsyncOpenAI(
                base_url=f"{URL}/v1", api_key=keys[name], http_client=http, max_retries=0
            )

        async with app.router.lifespan_context(app):
            yield rag, client


async def ask(client, *texts, **extra):
    messages = [{"role": "user", "content": " ".join([*texts, "Where does the river flow?"])}]
    return await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, extra_body=extra
    )


def cached(completion):
    return completion.usage.prompt_tokens_details.cached_tokens


async def stored(client, **changes):
    body = {"model": "tiny", "contents": [{"parts": [{"text": ONE}, {"text": TWO}]}], **changes}
    return await client.post(f"{URL}/v1beta/cachedContents", body=body, cast_to=dict[str, object])


async def test_a_chat_about_a_context_reuses_its_chunks_in_any_order(server):
    rag, client = server
    async with client("ada") as ada, client("bob") as bob:
        context = await stored(ada, systemInstruction={"parts": [{"text": "answer from the context"}]})
        one, two = context["chunkIds"]
        tokens = {name: rag.count_tokens(text) for name, text in ((one, ONE), (two, TWO))}
        for ids in ([one, two], [two, one], [two]):
            answer = await ask(ada, cached_content=context["name"], chunk_ids=ids)
            most = sum(tokens[name] for name in ids)
            assert most - 4 * len(ids) - 4 <= cached(answer)
            assert answer.usage.prompt_tokens > most
        whole = await ask(ada, cached_content=context["name"])
        assert whole.usage.prompt_tokens > sum(tokens.values())
        for extra in ({"cached_content": context["name"]}, {"cached_content": "cachedContents/" + "0" * 32}):
            with pytest.raises(openai.NotFoundError) as error:
                await ask(bob, **extra)
            assert error.value.code == "cached_content_not_found"
        with pytest.raises(openai.NotFoundError) as error:
            await ask(ada, cached_content=context["name"], chunk_ids=["0" * 64])
        assert error.value.code == "chunk_not_found"
        await ada.delete(f"{URL}/v1beta/{context['name']}", cast_to=dict[str, object])
        with pytest.raises(openai.NotFoundError):
            await ask(ada, cached_content=context["name"])


async def test_chunk_ids_alone_name_chunks_of_any_context_of_the_key(server):
    _, client = server
    async with client("ada") as ada, client("bob") as bob:
        first, second = [await stored(ada, contents=[{"parts": [{"text": text}]}]) for text in (ONE, TWO)]
        ids = [*second["chunkIds"], *first["chunkIds"]]
        by_text, by_id = await ask(ada, documents=[TWO, ONE]), await ask(ada, chunk_ids=ids)
        assert by_id.usage.prompt_tokens == by_text.usage.prompt_tokens
        assert by_id.choices[0].message.content == by_text.choices[0].message.content
        for tenant, unknown in ((bob, ids[0]), (ada, "0" * 64)):
            with pytest.raises(openai.NotFoundError, match=f"no chunk '{unknown}' in the key's cached"):
                await ask(tenant, chunk_ids=[unknown])
        await ada.delete(f"{URL}/v1beta/{first['name']}", cast_to=dict[str, object])
        with pytest.raises(openai.NotFoundError):
            await ask(ada, chunk_ids=ids)


async def test_tenants_that_ask_at_once_share_no_entry(server):
    rag, client = server
    draw = random.Random(3)
    words = WORDS.split()
    texts = [" ".join(draw.choices(words, k=12)) + "." for _ in range(8)]
    given: dict[str, set[str]] = {"ada": set(texts[:5]), "bob": set(texts[3:])}  # two are common
    async with client("ada") as ada, client("bob") as bob:
        calls = []
        for _ in range(12):
            for tenant, mine in ((ada, given["ada"]), (bob, given["bob"])):
                calls.append(ask(tenant, documents=draw.sample(sorted(mine), 3)))
        await asyncio.gather(*calls)
    rag.flush(30)
    ids = {text: byte_level()(text)["input_ids"][1:] for text in texts}
    allowed = {chunk_id(ids[text], name) for name in given for text in given[name]}
    chunks = [key for key in stored_in(rag) if key.encoding != "prefix"]
    assert {key.namespace for key in chunks} == {"ada", "bob"}
    assert {key.chunk_id for key in chunks} <= allowed
    mine, theirs = ({key.digest() for key in chunks if key.namespace == name} for name in given)
    assert len(mine) == len(theirs) == 5
    assert not mine & theirs


async def test_errors_have_the_form_of_the_api_that_was_asked(tmp_path, monkeypatch):
    with RagCache(speaker(), byte_level(), cache_dir=tmp_path) as rag:
        outer = Starlette()
        outer.mount("/mounted", create_app(rag))

    def bug(*arguments):
        raise AssertionError("secret")

    monkeypatch.setattr(ContextStore, "get", bug)
    transport = httpx.ASGITransport(outer, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=f"{URL}/mounted") as client:
        for method, path, status, name in (
            ("GET", "/v1beta/nothing", 404, "NOT_FOUND"),
            ("PUT", "/v1beta/cachedContents", 405, "INVALID_ARGUMENT"),
            ("POST", "/v1beta/cachedContents", 400, "INVALID_ARGUMENT"),
            ("GET", "/v1beta/cachedContents/" + "0" * 32, 500, "INTERNAL"),
            ("GET", "/v1/nothing", 404, None),
            ("PUT", "/v1/completions", 405, None),
            ("POST", "/v1/completions", 400, None),
        ):
            answer = await client.request(method, path, json={"model": 3})
            error = answer.json()["error"]
            assert answer.status_code == status
            assert error.keys() == (
                {"code", "message", "status"} if name else {"message", "type", "param", "code"}
            )
            assert error.get("status") == name
            assert "secret" not in answer.text
