"""Contexts that end while they are used, made or waited for, and errors meanwhile."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest

from context_kit import ONE, THREE, TWO, Engine, make
from engine_kit import stored_in
from ragcachekit import RagCache
from ragcachekit.errors import StoreError
from ragcachekit.server import ServerConfig, contexts, create_app
from ragcachekit.server.contexts import ContextStore
from ragcachekit.server.errors import ApiError
from ragcachekit.server.keys import Limits
from speaking import byte_level, speaker

TEXT = "Berlin is the capital of Germany. The river Spree flows in Berlin."


@pytest.fixture
def rag():
    return Engine()


@pytest.fixture(params=["memory", "files"])
def folder(request, tmp_path):
    return tmp_path / "contexts" if request.param == "files" else None


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()] if folder else []


def chunk_keys(rag):
    return {key for key in stored_in(rag) if key.encoding != "prefix"}


@pytest.mark.parametrize("end", ["deleted", "expired", "deleted by another process"])
async def test_a_request_that_read_a_context_before_its_end_leaves_no_chunk(rag, folder, clock, ada, end):
    store = ContextStore(rag, folder, clock)
    other = ContextStore(Engine(), folder, clock) if folder and end.endswith("process") else store
    made = await make(store, ada, ONE)
    with pytest.raises(ApiError):
        async with store.using(ada, "cachedContents/" + "0" * 32):
            pass
    async with store.using(ada, made.name) as used:
        if end == "expired":
            clock.now += 60
        else:
            await other.delete(ada, made.name)
        await store.expire()
        assert rag.encoded == set(), "it is forgotten at once, too"
        assert store.all(ada) == []
        rag.encode(used.chunks, namespace="ada", system=None)  # as an answer that began before
    await store.expire()
    assert rag.encoded == set()
    assert files(folder) == []
    rag.encode([ONE], namespace="ada", system=None)
    await store.expire()
    assert rag.encoded == {("ada", ONE)}, "after that the text is anybody's"


async def test_an_answer_whose_context_is_deleted_before_it_is_submitted(tmp_path, monkeypatch):
    config = ServerConfig(model_name="tiny")
    with RagCache(speaker(), byte_level(), cache_dir=tmp_path, policy="lego:4", cold="now") as rag:
        app, submit, loop = create_app(rag, config), rag.submit, asyncio.get_running_loop()
        url = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        async with url as client, app.router.lifespan_context(app):
            body = {"model": "tiny", "contents": [{"parts": [{"text": TEXT}]}]}
            name = (await client.post("/v1beta/cachedContents", json=body)).json()["name"]

            def late(*arguments, **options):
                gone = asyncio.run_coroutine_threadsafe(client.delete(f"/v1beta/{name}"), loop)
                assert gone.result(10).status_code == 200
                return submit(*arguments, **options)

            monkeypatch.setattr(rag, "submit", late)
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 1}
            answer = await client.post("/v1/chat/completions", json={**asked, "cached_content": name})
            assert answer.status_code == 200
            rag.flush(10)
            assert chunk_keys(rag), "the race that this is about did not happen"
        async with app.router.lifespan_context(app), asyncio.timeout(10):  # its first sweep
            while chunk_keys(rag):
                await asyncio.sleep(0.01)


async def test_sweeping_goes_on_after_any_error(rag, tmp_path, clock, ada, bob, monkeypatch, caplog):
    store = ContextStore(rag, tmp_path / "contexts", clock)
    await make(store, ada, ONE)
    clock.now += 60
    rag.fails = RuntimeError("a bug")

    def gone(_):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(contexts.ContextFiles, "owners", gone)
        sweeping = asyncio.create_task(store.run(every=0.001))
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.02)
    rag.fails = None
    async with asyncio.timeout(10):
        while rag.encoded:
            await asyncio.sleep(0.001)
    sweeping.cancel()
    assert {"the disk is gone", "a bug"} <= set(caplog.text.replace(": ", "\n").splitlines())


async def test_the_engine_is_flushed_whatever_became_of_the_sweeps(monkeypatch, tmp_path):
    async def fail(self):
        raise OSError("the disk is gone")

    monkeypatch.setattr(ContextStore, "run", fail)
    with RagCache(speaker(), byte_level(), cache_dir=tmp_path) as rag:
        flushed = threading.Event()
        monkeypatch.setattr(rag, "flush", lambda _: (flushed.set(), True)[1])
        app = create_app(rag)
        with suppress(KeyError):
            async with app.router.lifespan_context(app):
                await asyncio.sleep(0.01)
                raise KeyError("a stop by an error")
        assert flushed.is_set()


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_creation_that_is_cancelled_while_its_file_is_written(
    rag, tmp_path, clock, ada, cancels, monkeypatch
):
    store = ContextStore(rag, tmp_path / "contexts", clock)
    begun, go_on, put = threading.Event(), threading.Event(), contexts.ContextFiles.put

    def slow(self, owner, context, *, new=False):
        if not new:
            begun.set()
            assert go_on.wait(10)
        put(self, owner, context, new=new)

    monkeypatch.setattr(contexts.ContextFiles, "put", slow)
    task = asyncio.create_task(make(store, ada, ONE))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0.005)
    await store.expire()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.expire()
    assert store.all(ada) == []
    assert rag.encoded == set()
    assert files(tmp_path / "contexts") == []


async def test_creations_that_failed_count_until_they_are_forgotten(rag, clock, ada):
    store, ada = ContextStore(rag, clock=clock), replace(ada, limits=Limits(contexts=2))
    rag.fails = StoreError("the disk is gone")
    for _ in range(2):
        with pytest.raises(StoreError):
            await make(store, ada, ONE)
    with pytest.raises(ApiError, match="may have 2 cached contents") as error:
        await make(store, ada, TWO)
    assert error.value.status == 429
    assert rag.encoded == {("ada", ONE)}
    rag.fails = None
    assert (await make(store, ada, THREE)).chunks == (THREE,), "at once, not after the next sweep"
    assert rag.encoded == {("ada", THREE)}


async def test_owners_encode_by_turns_and_all_chunks_are_registered_as_one_list(rag, clock, ada, bob):
    store = ContextStore(rag, clock=clock)
    long, short = [str(number) * 2500 for number in range(8)], [f"{number} is short" for number in range(9)]
    rag.go_on.clear()
    tasks = [asyncio.create_task(make(store, ada, *long)) for _ in range(3)]
    await asyncio.to_thread(rag.begun.wait, 10)
    tasks.append(asyncio.create_task(make(store, bob, *short)))
    await asyncio.sleep(0.05)
    rag.go_on.set()
    made = await asyncio.gather(*tasks)
    assert [one.chunk_ids for one in made[:3]] == [tuple(f"ada-{text}" for text in long)] * 3
    assert made[3].chunk_ids == tuple(f"bob-{text}" for text in short)
    assert sorted(rag.registered) == sorted([*[tuple(long)] * 3, tuple(short)])
    assert [turn for turn in rag.turns if turn[0] == "bob"] == [("bob", short)]
    assert {len(texts) for owner, texts in rag.turns if owner == "ada"} == {2}
    assert rag.turns.index(("bob", short)) <= 3, "after a turn of each other context, not after all 12"


async def test_a_creation_has_a_deadline(rag, clock, ada):
    store = ContextStore(rag, clock=clock, timeout=0.05)
    rag.go_on.clear()
    with pytest.raises(ApiError, match="not encoded within") as error:
        await make(store, ada, ONE)
    assert error.value.status == 504
    rag.go_on.set()
    await store.expire()
    assert rag.encoded == set()
