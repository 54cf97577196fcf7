"""Contexts in memory and in files: restarts, ends in use, failures, cancelled creations, full volumes."""

import asyncio
import errno
import os
import stat
import threading
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest

from context_kit import ONE, THREE, TWO, Engine, make
from engine_kit import stored_in
from faults import Faults, injected
from ragcachekit import RagCache
from ragcachekit.errors import StoreError
from ragcachekit.server import ServerConfig, contexts, create_app
from ragcachekit.server.contexts import ContextStore, texts_of
from ragcachekit.server.errors import ApiError
from speaking import byte_level, speaker

TEXT = "Berlin is the capital of Germany. The river Spree flows in Berlin."
BODY = {"model": "models/tiny", "contents": [{"parts": [{"text": ONE}]}], "ttl": "60s"}


@pytest.fixture
def rag():
    return Engine()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "contexts"


@pytest.fixture(params=["memory", "files"])
def place(request, folder):
    return folder if request.param == "files" else None


@pytest.fixture
def store(rag, folder, clock):
    """The store behind the client's routes."""
    return ContextStore(rag, folder, clock=clock)


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()] if folder else []


async def test_a_restart_keeps_contexts(rag, folder, clock, ada, bob):
    made = await make(ContextStore(rag, folder, clock), ada, ONE, TWO, system="Zürich 😀")
    assert rag.retained == [60.0]
    again = ContextStore(rag, folder, clock)
    assert again.get(ada, made.name) == made
    assert again.all(ada) == [made]
    assert again.all(bob) == []
    assert (again.holding(ada, made.chunk_ids), again.holding(bob, made.chunk_ids)) == ([made.name], [])
    assert texts_of([f"ada-{TWO}", f"ada-{ONE}", f"ada-{TWO}"], [made], "it") == [TWO, ONE, TWO]
    with pytest.raises(ApiError, match="no chunk 'bob"):
        texts_of([f"bob-{ONE}"], [made], "it")
    clock.now += 60
    await again.expire()
    assert rag.encoded == set()
    assert files(folder) == []


async def test_what_a_killed_writer_left_goes_after_a_while(rag, folder, clock, ada):
    store = ContextStore(rag, folder, clock)
    made = await make(store, ada, ONE)
    (owner,) = folder.iterdir()
    old, new = owner / ".a.json.1.x", owner / ".b.json.1.x"
    for path in (old, new):
        path.write_text(ONE)
    os.utime(old, (1, 1))
    await store.expire()
    assert sorted(path.name for path in owner.glob(".*")) == [new.name]
    assert store.all(ada) == [made]


async def test_others_cannot_read_the_files(rag, folder, clock, ada):
    folder.mkdir(mode=0o755)
    await make(ContextStore(rag, folder, clock), ada, ONE)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(folder)} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())} == {0o700}


def test_a_folder_that_others_may_write_to_is_refused(rag, folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StoreError, match="chmod 700"):
        ContextStore(rag, folder)


@pytest.mark.parametrize("damage", ["{", '{"name": 3}', "[" * 100_000])
async def test_a_damaged_file_is_no_context(rag, folder, clock, ada, caplog, damage):
    store = ContextStore(rag, folder, clock)
    made, other = await make(store, ada, ONE), await make(store, ada, TWO)
    next(folder.rglob(f"{made.name.rpartition('/')[2]}.json")).write_text(damage)
    assert store.all(ada) == [other]
    with pytest.raises(ApiError):
        store.get(ada, made.name)
    assert "cannot be read" in caplog.text


async def test_two_processes_see_what_the_other_does(folder, clock, ada):
    mine, theirs = Engine(), Engine()
    here, there = ContextStore(mine, folder, clock), ContextStore(theirs, folder, clock)
    made = await make(here, ada, ONE)
    theirs.encode(there.get(ada, made.name).chunks, namespace="ada", system=None)
    changed = await there.update(ada, made.name, lambda now: now + 90)
    assert here.get(ada, made.name) == changed
    await there.delete(ada, made.name)
    with pytest.raises(ApiError):
        here.get(ada, made.name)
    assert mine.encoded == {("ada", ONE)}
    await here.expire()
    assert mine.encoded == theirs.encoded == set()


async def test_a_deletion_that_fails_is_tried_again(rag, place, clock, ada):
    store = ContextStore(rag, place, clock)
    made = await make(store, ada, ONE)
    rag.fails = StoreError("the disk is gone")
    with pytest.raises(ApiError, match="could not confirm") as error:
        await store.delete(ada, made.name)
    assert error.value.status == 500
    assert store.all(ada) == []
    await store.expire()
    assert rag.encoded == {("ada", ONE)}
    rag.fails = None
    if place:
        store = ContextStore(rag, place, clock)  # also after a restart
    await store.expire()
    assert rag.encoded == set()


@pytest.mark.parametrize("error", [ValueError("a chunk is too long"), RuntimeError("a bug")])
async def test_a_creation_that_fails_leaves_nothing(rag, clock, ada, error):
    store = ContextStore(rag, clock=clock)
    kept = await make(store, ada, ONE)
    rag.fails = error
    with pytest.raises(ApiError if isinstance(error, ValueError) else RuntimeError, match=str(error)):
        await make(store, ada, ONE, TWO)
    rag.fails = None
    await store.expire()
    assert store.all(ada) == [kept]
    assert rag.encoded == {("ada", ONE)}


async def test_a_context_in_the_making_keeps_its_chunks_and_counts(rag, clock, ada):
    store = ContextStore(rag, clock=clock)
    old = await make(store, ada, ONE)
    rag.begun.clear()
    rag.go_on.clear()
    task = asyncio.create_task(make(store, ada, ONE, THREE))
    await asyncio.to_thread(rag.begun.wait, 10)
    await store.delete(ada, old.name)
    assert ("ada", ONE) in rag.encoded
    assert store.all(ada) == [], "it is not there before it is whole"
    rag.go_on.set()
    made = await task
    assert store.all(ada) == [made]


async def test_tokens_of_all_contexts_are_limited_and_charged_before_they_are_computed(rag, clock, ada):
    store = ContextStore(rag, clock=clock)
    ada = replace(ada, limits=replace(ada.limits, context_tokens=len(ONE) + len(TWO)))
    charged: list[int] = []
    await make(store, ada, ONE, charge=charged.append)
    with pytest.raises(ApiError, match="tokens in them") as error:
        await make(store, ada, THREE, system="a", charge=charged.append)
    assert error.value.status == 429
    assert charged == [len(ONE)]
    assert rag.encoded == {("ada", ONE)}

    def refuse(tokens):
        raise ApiError(429, "too many")

    with pytest.raises(ApiError, match="too many"):
        await make(store, ada, TWO, charge=refuse)
    assert rag.encoded == {("ada", ONE)}
    await make(store, ada, TWO)


async def test_a_creation_whose_process_was_killed_is_forgotten_at_its_deadline(rag, folder, clock, ada):
    rag.go_on.clear()
    killed = ContextStore(rag, folder, clock, timeout=100)
    task = asyncio.create_task(make(killed, ada, ONE))
    await asyncio.to_thread(rag.begun.wait, 10)
    other = ContextStore(rag, folder, clock, timeout=100)
    for seconds, left in ((199, {("ada", ONE)}), (1, set())):
        clock.now += seconds
        await other.expire()
        assert rag.encoded == left
        assert other.all(ada) == []
    rag.go_on.set()
    with pytest.raises(ApiError, match="not found"):
        await task


def chunk_keys(rag):
    return {key for key in stored_in(rag) if key.encoding != "prefix"}


@pytest.mark.parametrize("end", ["deleted", "expired", "deleted by another process"])
async def test_a_request_that_read_a_context_before_its_end_leaves_no_chunk(rag, place, clock, ada, end):
    store = ContextStore(rag, place, clock)
    other = ContextStore(Engine(), place, clock) if place and end.endswith("process") else store
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
    assert files(place) == []
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


async def test_a_creation_that_is_cancelled_while_its_file_is_written(rag, tmp_path, clock, ada, monkeypatch):
    store = ContextStore(rag, tmp_path / "contexts", clock)
    begun, go_on, put = threading.Event(), threading.Event(), contexts.ContextFiles.put

    def slow(self, owner, context):
        if context.chunk_ids:
            begun.set()
            assert go_on.wait(10)
        put(self, owner, context)

    monkeypatch.setattr(contexts.ContextFiles, "put", slow)
    task = asyncio.create_task(make(store, ada, ONE))
    await asyncio.to_thread(begun.wait, 10)
    sweep = asyncio.create_task(store.expire())
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.005)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await sweep
    await store.expire()
    assert store.all(ada) == []
    assert rag.encoded == set()
    assert files(tmp_path / "contexts") == []


async def test_owners_encode_by_turns_and_all_chunks_are_registered_as_one_list(rag, clock, ada, bob):
    store = ContextStore(rag, clock=clock)
    long, short = [f"{number} of many" for number in range(32)], [f"{number} is short" for number in range(8)]
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
    assert [turn for turn in rag.turns if turn[0] == "bob"] == [("bob", tuple(short))]
    assert {len(texts) for owner, texts in rag.turns if owner == "ada"} == {8}
    assert rag.turns.index(("bob", tuple(short))) <= 3, "after a turn of each other context, not after all 12"


async def test_a_creation_has_a_deadline(rag, clock, ada):
    store = ContextStore(rag, clock=clock, timeout=0.05)
    rag.go_on.clear()
    with pytest.raises(ApiError, match="not encoded within") as error:
        await make(store, ada, ONE)
    assert error.value.status == 504
    rag.go_on.set()
    await store.expire()
    assert rag.encoded == set()


def full(folder):
    """The volume is full: all fails but what removes."""
    faults = Faults(folder, errno.ENOSPC, lambda _: faults.calls[-1] != "unlink")
    return injected(faults)


async def test_a_full_volume_is_507_and_loses_nothing(client_of, store, folder, rag):
    async with client_of("ada") as client:
        made = (await client.post("/cachedContents", json=BODY)).json()
        path, encoded = "/" + made["name"], set(rag.encoded)
        files = {file: file.read_bytes() for file in folder.rglob("*.json")}
        other = {**BODY, "contents": [{"parts": [{"text": TWO}]}]}
        with full(folder):
            answers = [
                await client.patch(path, json={"ttl": "900s"}),
                await client.post("/cachedContents", json=other),
                await client.delete(path),
            ]
            assert (await client.get(path)).json() == made
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (507, 507)
            assert error["status"] == "RESOURCE_EXHAUSTED"
            assert "full" in error["message"]
            assert str(folder) not in error["message"]
        assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == files
        assert encoded <= rag.encoded
        assert (await client.get("/cachedContents")).json()["cachedContents"] == [
            {name: value for name, value in made.items() if name != "chunkIds"}
        ]
        changed = (await client.patch(path, json={"ttl": "900s"})).json()
        assert changed["expireTime"] != made["expireTime"]
        assert (await client.post("/cachedContents", json=other)).status_code == 200
        assert (await client.delete(path)).status_code == 200
