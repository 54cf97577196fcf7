"""Contexts over HTTP, as Gemini's clients use them."""

import asyncio
from dataclasses import replace

import pytest

from ragcachekit import Chunk, Prompt, RagCache, Text
from ragcachekit.prompt.segments import marked
from ragcachekit.server.contexts import ContextStore
from speaking import byte_level, speaker

ONE = "Berlin is the capital of Germany. The river Spree flows in Berlin."
TWO = "Paris is the capital of France; the river Seine flows in Paris."
BODY = {
    "model": "models/tiny",
    "contents": [{"role": "user", "parts": [{"text": ONE}, {"text": TWO}]}],
    "systemInstruction": {"parts": [{"text": "answer from the context"}]},
    "ttl": "300s",
    "displayName": "rivers",
}


def reused(rag, namespace, text):
    """Tokens of a chunk that a prompt of the namespace takes from the cache."""
    prompt = Prompt([Text("Answer from the context."), Chunk(text), Text("Where?")])
    return rag.generate(prompt, namespace=namespace, max_new_tokens=1).report.link.reused_tokens


async def made(client, **changes):
    response = await client.post("/cachedContents", json={**BODY, **changes})
    assert response.status_code == 200, response.text
    return response.json()


async def test_creation_encodes_the_chunks_and_answers_as_gemini(client_of, rag, clock):
    async with client_of("ada") as ada:
        context = await made(ada)
        tokens = sum(map(rag.count_tokens, (ONE, TWO, "answer from the context")))
        assert context == {
            "name": context["name"],
            "model": "models/tiny",
            "displayName": "rivers",
            "createTime": "2023-11-14T22:13:20Z",
            "updateTime": "2023-11-14T22:13:20Z",
            "expireTime": "2023-11-14T22:18:20Z",
            "usageMetadata": {"totalTokenCount": tokens},
            "chunkIds": context["chunkIds"],
        }
        assert len(context["name"].removeprefix("cachedContents/")) == 32
        assert context["chunkIds"] == rag.encode([ONE, TWO], namespace="ada")
        assert (await ada.get(context["name"])).json() == context
    assert reused(rag, "ada", ONE) > 0
    assert reused(rag, "bob", ONE) == 0


async def test_chunks_are_encoded_behind_the_text_that_the_template_puts_before_them(clock, tmp_path, ada):
    with RagCache(
        speaker(), byte_level(), cache_dir=tmp_path, cold="never", policy="reuse", encoder="system"
    ) as rag:
        for number, system in enumerate(("answer from the context", None)):
            who = replace(ada, namespace=f"tenant-{number}")
            body = {"model": "tiny", "lifetime": lambda now: now + 9, "system": system}
            context = await ContextStore(rag, clock=clock).create(who, [ONE], **body)
            messages = [{"role": "system", "content": context.system}] if system else []
            messages.append({"role": "user", "content": [marked(ONE), "Where?"]})
            link = rag.generate(messages, namespace=who.namespace, max_new_tokens=1).report.link
            assert link.approximate_tokens == 0
            assert link.exact_tokens >= rag.count_tokens(ONE)


async def test_only_the_time_of_expiry_changes(client_of, clock):
    async with client_of("ada") as ada:
        context = await made(ada, ttl=None)
        assert context["expireTime"] == "2023-11-14T23:13:20Z", "an hour by default"
        clock.now += 10
        changed = (await ada.patch(context["name"], json={"ttl": "60.5s"})).json()
        assert changed == {
            **context,
            "updateTime": "2023-11-14T22:13:30Z",
            "expireTime": "2023-11-14T22:14:30.500000Z",
        }
        later = "2023-11-15T00:00:00+01:00"
        path = f"{context['name']}?updateMask=expireTime"
        assert (await ada.patch(path, json={"expireTime": later})).json()["expireTime"] == (
            "2023-11-14T23:00:00Z"
        )
        for body, query in (
            ({"displayName": "x"}, ""),
            ({"ttl": "5s"}, "?updateMask=displayName"),
            ({}, ""),
        ):
            assert (await ada.patch(context["name"] + query, json=body)).status_code == 400
        assert (await ada.get(context["name"])).json()["displayName"] == "rivers"


async def test_deleting_forgets_what_no_other_context_has(client_of, rag):
    async with client_of("ada") as ada:
        both = await made(ada)
        one = await made(ada, contents=[{"parts": [{"text": f" {ONE}\n"}]}])
        assert (await ada.delete(both["name"])).json() == {}
        assert (await ada.get(both["name"])).status_code == 404
        assert (await ada.delete(both["name"])).status_code == 404
        assert reused(rag, "ada", TWO) == 0
        assert reused(rag, "ada", ONE) > 0
        await ada.delete(one["name"])
        assert reused(rag, "ada", ONE) == 0


async def test_expired_contexts_are_unknown_and_then_forgotten(client_of, store, rag, clock):
    async with client_of("ada") as ada:
        context = await made(ada)
        clock.now += 299
        await store.expire()
        assert reused(rag, "ada", ONE) > 0
        clock.now += 1
        assert (await ada.get(context["name"])).status_code == 404
        assert (await ada.get("/cachedContents")).json() == {"cachedContents": []}
        await store.expire()
    assert reused(rag, "ada", ONE) == 0


async def test_another_tenants_context_is_like_none(client_of, rag):
    async with client_of("ada") as ada, client_of("bob") as bob:
        context = await made(ada)
        unknown = "cachedContents/" + "0" * 32
        for name in (context["name"], unknown):
            answers = [await bob.get(name), await bob.patch(name, json={"ttl": "5s"}), await bob.delete(name)]
            for answer in answers:
                assert answer.status_code == 404
                assert answer.json() == {
                    "error": {
                        "code": 404,
                        "message": f"CachedContent not found (or permission denied): '{name}'.",
                        "status": "NOT_FOUND",
                    }
                }
        assert (await bob.get("/cachedContents")).json() == {"cachedContents": []}
        assert (await ada.get(context["name"])).json() == context
    assert reused(rag, "ada", ONE) > 0


@pytest.mark.parametrize("name", ["%2e%2e", "../ada", "a" * 5000, "A" * 32, "0" * 31 + "%0a"])
async def test_names_that_are_no_names(client_of, name):
    async with client_of("ada") as ada:
        for call in (ada.get, ada.delete):
            answer = await call(f"/cachedContents/{name}")
            assert answer.status_code == 404
            assert len(answer.content) < 1000


async def test_a_key_has_so_many_contexts(client_of, clock):
    async with client_of("ada") as ada, client_of("bob") as bob:
        answers = await asyncio.gather(*(ada.post("/cachedContents", json=BODY) for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["status"] == "RESOURCE_EXHAUSTED"
        await made(bob)
        clock.now += 300
        await made(ada)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "models/other"},
        {"contents": [{"parts": [{"text": " "}]}]},
        {"contents": [{"parts": [{"inlineData": {"data": "aGk=", "mimeType": "text/plain"}}]}]},
        {"contents": [{"parts": [{"text": "a b " * 2000}]}]},
        {"contents": [{"parts": [{"text": "a"}] * 4097}]},
        {"tools": []},
        {"displayName": "x" * 129},
        {"ttl": "300"},
        {"ttl": "0s"},
        {"ttl": "9999999999s"},
        {"ttl": "٣s"},
        {"ttl": None, "expireTime": "2023-11-14T22:00:00Z"},
        {"ttl": None, "expireTime": "2099-11-14T22:00:00"},
        {"ttl": "5s", "expireTime": "2099-11-14T22:00:00Z"},
    ],
)
async def test_bodies_that_cannot_be(client_of, rag, change):
    async with client_of("ada") as ada:
        answer = await ada.post("/cachedContents", json={**BODY, **change})
        assert answer.status_code == (404 if "model" in change else 400)
        assert set(answer.json()["error"]) == {"code", "message", "status"}
        assert answer.json()["error"]["status"] == ("NOT_FOUND" if "model" in change else "INVALID_ARGUMENT")
        assert (await ada.get("/cachedContents")).json() == {"cachedContents": []}
