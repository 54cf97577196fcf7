"""Contexts in files, and what remains when a step fails, is cancelled, or two happen at once."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace

import pytest

from context_kit import ONE, THREE, TWO, Engine, make
from ragcachekit.errors import StoreError
from ragcachekit.server.contexts import ContextStore
from ragcachekit.server.errors import ApiError


@pytest.fixture
def rag():
    return Engine()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "contexts"


def modes(folder):
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


async def test_a_restart_keeps_contexts(rag, folder, clock, ada, bob):
    made = await make(ContextStore(rag, folder, clock), ada, ONE, TWO, system="Zürich 😀")
    again = ContextStore(rag, folder, clock)
    assert again.get(ada, made.name) == made
    assert again.all(ada) == [made]
    assert again.all(bob) == []
    assert made.texts_of([f"ada-{TWO}", f"ada-{ONE}", f"ada-{TWO}"]) == (TWO, ONE, TWO)
    with pytest.raises(ApiError, match="no chunk 'bob"):
        made.texts_of([f"bob-{ONE}"])
    clock.now += 60
    await again.expire()
    assert rag.encoded == set()
    assert [path for path in folder.rglob("*") if path.is_file()] == []


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
    assert modes(folder) == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())} == {0o700}


def test_a_folder_that_others_may_write_to_is_refused(rag, folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StoreError, match="chmod 700"):
        ContextStore(rag, folder)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"name": 3}', "[" * 100_000])
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


@pytest.mark.parametrize("kept_in", ["memory", "files"])
async def test_a_deletion_that_fails_is_tried_again(rag, folder, clock, ada, kept_in):
    store = ContextStore(rag, folder if kept_in == "files" else None, clock)
    made = await make(store, ada, ONE)
    rag.fails = StoreError("the disk is gone")
    with pytest.raises(ApiError, match="could not confirm") as error:
        await store.delete(ada, made.name)
    assert error.value.status == 500
    assert store.all(ada) == []
    await store.expire()
    assert rag.encoded == {("ada", ONE)}
    rag.fails = None
    if kept_in == "files":
        store = ContextStore(rag, folder, clock)  # also after a restart
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


async def test_a_creation_that_is_cancelled_leaves_nothing(rag, clock, ada):
    store = ContextStore(rag, clock=clock)
    rag.go_on.clear()
    task = asyncio.create_task(make(store, ada, ONE))
    await asyncio.to_thread(rag.begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    rag.go_on.set()
    await store.expire()
    assert store.all(ada) == []
    assert rag.encoded == set()


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
