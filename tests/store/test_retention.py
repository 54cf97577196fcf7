"""Retained entries go after others, until they are idle for their time, and never take all of a tier."""

import time

import pytest

from engine_kit import chunk, rag_for, stored_in, text
from ragcachekit import Chunk, Prompt, StoreConfig
from ragcachekit.store.eviction import POLICIES, open_eviction
from ragcachekit.store.memory import HostStore
from ragcachekit.types import chunk_id
from store_kit import key_of, kv_of

BUDGET = 10 * kv_of(1).nbytes


@pytest.fixture
def now(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def put(store, *numbers, retain=0.0):
    for number in numbers:
        assert store.put(key_of(number), kv_of(number))
        store.retain(key_of(number), retain)


def left(store, numbers):
    return [number for number in numbers if key_of(number) in store]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retained_entry_outlives_others_until_it_is_idle_for_its_time(policy, now):
    store = HostStore(BUDGET, policy=open_eviction(policy))
    put(store, 0, 1, retain=60.0)
    put(store, 2)
    put(store, *range(100, 130))
    assert left(store, [0, 1, 2]) == [0, 1]
    now[0] += 50
    assert store.get(key_of(0)) is not None, "which renews it"
    now[0] += 50
    put(store, *range(200, 260))
    assert left(store, [0, 1]) == [0]


@pytest.mark.parametrize("policy", ["pgdsf", "lru"])
@pytest.mark.parametrize("options", [{}, {"quotas": {key_of(0).namespace: BUDGET - 1}}])
def test_more_than_fits_may_be_retained_and_others_keep_half(policy, options, now):
    store = HostStore(BUDGET, policy=open_eviction(policy), **options)
    put(store, *range(30), retain=3600.0)
    put(store, *range(100, 103))
    assert left(store, range(100, 103)) == [100, 101, 102]
    put(store, *range(30, 60), retain=3600.0)
    assert len(left(store, range(100, 103))) + len(left(store, range(60))) == store.stats()[0].entries
    assert left(store, range(100, 103)) == [100, 101, 102], "no more of them than half"


def test_encode_chunks_and_requests_may_ask_for_it():
    kept, marked, other = chunk(40, 1), Chunk(token_ids=chunk(40, 2).token_ids, retain=600), chunk(40, 3)
    prompts = [Prompt([text(4, 9), one, text(4, 8)]) for one in (kept, marked, other)]
    with rag_for("llama", store=StoreConfig(host_bytes=400_000), encoder="system") as rag:
        for prompt, options in zip(prompts, ({"retain": 600}, {}, {}), strict=True):
            rag.generate(prompt, max_new_tokens=1, **options)
        for seed in range(100, 130):
            rag.generate(Prompt([text(4, 9), chunk(40, seed), text(4, 8)]), max_new_tokens=1)
        ids = {entry.chunk_id for entry in stored_in(rag)}
        found = [chunk_id(one.token_ids, "default") in ids for one in (kept, marked, other)]
        assert found == [True, True, False]
        for call in (Chunk, rag.generate, rag.encode):
            with pytest.raises(ValueError, match="retain must be"):
                call("text", retain=-1)
