"""The Redis tier: what several clients share, what the server may do to us, what outlives its absence."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ragcachekit.errors import StoreError
from ragcachekit.store import deadlines
from ragcachekit.store.redis_store import RedisStore
from redis_kit import (
    KEY_BYTES,
    REDIS_BUDGET,
    RedisServer,
    failures_of,
    forget_at_last,
    redis_store,
    running_server,
)
from store_kit import KEY, contents, key_of, kv_of

SHORT = 0.05  # seconds that a test waits for a server that hangs


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.empty()
    return running


@pytest.fixture
def mortal() -> Iterator[RedisServer]:
    """A server of one test's own, to be killed."""
    with running_server(tcp=True) as server:
        yield server


def agrees(server: RedisServer, *stores: RedisStore) -> None:
    """The stores, the server's sums and the entries themselves say the same."""
    sizes = [len(blob) for blob in server.entries().values()]
    assert server.sums().get("all", 0) == sum(sizes)
    for store in stores:
        assert [(s.entries, s.nbytes) for s in store.stats()] == [(len(sizes), sum(sizes))]


def test_two_clients_share_entries_and_budget(server: RedisServer) -> None:
    one, two = (redis_store(server, budget=20_000) for _ in range(2))
    for number in range(20):
        assert (one, two)[number % 2].put(key_of(number), kv_of(number, tokens=8))
        agrees(server, one, two)
        assert server.sums()["all"] <= 20_000
    kept = [number for number in range(20) if key_of(number) in one]
    assert kept == list(range(20 - len(kept), 20))
    for number in kept:
        found = two.get(key_of(number))
        assert found is not None
        assert contents(found.kv) == contents(kv_of(number, tokens=8))


def test_use_by_one_client_counts_for_the_other(server: RedisServer) -> None:
    first = redis_store(server)
    assert first.put(key_of(0), kv_of(0))
    budget = 5 * first.stats()[0].nbytes // 2
    one, two = (redis_store(server, budget=budget) for _ in range(2))
    assert one.put(key_of(1), kv_of(1))
    assert two.get(key_of(0)) is not None
    assert one.put(key_of(2), kv_of(2))
    assert [key_of(number) in two for number in range(3)] == [True, False, True]


def test_a_smaller_budget_holds_from_opening_on(server: RedisServer) -> None:
    store = redis_store(server)
    for number in range(5):
        store.put(key_of(number), kv_of(number))
    smaller = redis_store(server, budget=4_000)
    assert smaller.stats()[0].nbytes <= 4_000
    assert [key_of(number) in smaller for number in range(5)] == [False, False, False, True, True]


def test_large_entries_are_not_its_business(server: RedisServer) -> None:
    store = redis_store(server, entry_bytes=1_000)
    assert store.put(key_of(1), kv_of(1, tokens=2))
    assert not store.put(key_of(2), kv_of(2, tokens=20))
    assert store.stats()[0].failed_writes == 0
    assert store.get(key_of(1)) is not None


def test_a_namespace_stays_within_its_quota(server: RedisServer) -> None:
    store = redis_store(server, quotas={"small": 4_000, "*": 8_000})
    for number in range(10):
        for namespace in ("small", "other"):
            assert store.put(key_of(number, namespace=namespace), kv_of(number))
    sizes = {len(blob) for blob in server.entries().values()}
    kept = {ns: [n for n in range(10) if key_of(n, namespace=ns) in store] for ns in ("small", "other")}
    assert len(kept["small"]) == 4_000 // max(sizes) < len(kept["other"]) == 8_000 // max(sizes)
    assert kept["small"][-1] == kept["other"][-1] == 9
    assert not store.put(key_of(99, namespace="small"), kv_of(1, tokens=40))
    assert store.stats()[0].failed_writes == 1
    agrees(server, store)


def test_an_entry_copied_to_another_name_is_a_miss(server: RedisServer) -> None:
    store = redis_store(server)
    mine, theirs = key_of(1), key_of(1, namespace="globex/docs")
    store.put(mine, kv_of(1))
    store.put(theirs, kv_of(2))
    name = "{ragcachekit}:e:"
    server.client.copy(name + mine.digest(), name + theirs.digest(), replace=True)
    assert store.get(theirs) is None
    assert store.stats()[0].damaged == 1
    assert theirs not in store
    assert store.get(mine) is not None
    agrees(server, store)


def test_entries_of_another_key_are_misses_and_stay(server: RedisServer) -> None:
    ours, others = redis_store(server), redis_store(server, key=b"another key of some length")
    ours.put(KEY, kv_of(1))
    assert others.get(KEY) is None
    assert (others.stats()[0].misses, others.stats()[0].damaged) == (1, 0)
    assert ours.get(KEY) is not None
    assert others.put(KEY, kv_of(1))
    assert others.get(KEY) is not None
    assert ours.get(KEY) is None


def test_what_the_bookkeeping_does_not_know_is_not_served(server: RedisServer) -> None:
    store = redis_store(server)
    store.put(KEY, kv_of(1))
    server.client.delete("{ragcachekit}:info")
    assert store.get(KEY) is None
    assert server.entries() == {}


def test_a_thousand_lookups_of_another_tenant(server: RedisServer) -> None:
    store = redis_store(server)
    for number in range(20):
        store.put(key_of(number), kv_of(number))
    hits = sum(
        store.get(key_of(number % 20, namespace=f"tenant-{number}")) is not None for number in range(1_000)
    )
    assert (hits, store.stats()[0].misses) == (0, 1_000)


def write_many(url: str, worker: int) -> None:
    store = RedisStore(url, 12_000, key=KEY_BYTES, entry_bytes=REDIS_BUDGET, deadline=20)
    failures = failures_of(store._executor)
    for step in range(60):
        number = (worker * 5 + step * 3) % 13
        if step % 10 == 9:
            store.forget("acme/docs", frozenset({f"chunk-{number}"}))
        elif store.put(key_of(number), kv_of(number, tokens=number + 1)):
            found = store.get(key_of((number + step) % 13))
            assert found is None or found.kv.tokens == (number + step) % 13 + 1
    assert failures == []
    store.close()
    os._exit(0)


def test_four_processes_cannot_corrupt_the_sums(server: RedisServer) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_many, args=(server.url, worker)) for worker in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    store = redis_store(server, budget=12_000)
    agrees(server, store)
    entries = store.stats()[0].entries
    assert entries > 0
    assert store.forget("acme/docs") == entries
    assert (server.entries(), server.sums().get("all")) == ({}, 0)


def test_a_dead_server_is_no_error_from_opening_on(
    mortal: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal.kill()
    clock = Clock()
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=clock))
    store = redis_store(mortal)
    assert not store.put(KEY, kv_of(1))
    assert store.get(KEY) is None
    assert KEY not in store
    with pytest.raises(StoreError, match="the redis tier may hold"):
        store.forget("acme/docs")
    assert store.stats()[0].entries == 0
    assert store._executor._breaker.is_open
    mortal.start()
    assert store.get(KEY) is None, "left alone during the cool-down"
    clock.now += 6
    assert store.forget("acme/docs") == 0
    assert store.put(KEY, kv_of(1))
    assert store.get(KEY) is not None


def test_a_restarted_server_is_used_again_without_a_failure(mortal: RedisServer) -> None:
    store = redis_store(mortal)
    failures = failures_of(store._executor)
    assert store.put(KEY, kv_of(1))
    mortal.kill()
    mortal.start()
    assert store.get(KEY) is None
    assert store.put(KEY, kv_of(1))
    assert store.get(KEY) is not None
    assert failures == []


@contextmanager
def hung(server: RedisServer, store: RedisStore) -> Iterator[None]:
    """The server hangs; the store, otherwise patient, gives up quickly."""
    patient, store._executor.deadline = store._executor.deadline, SHORT
    server.hang()
    try:
        yield
    finally:
        server.go_on()
        store._executor.deadline = patient


def test_a_forget_during_an_absence_is_an_error(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "FAILURES", 100)
    store = redis_store(server)
    gone, here = key_of(1), key_of(2)
    for key in (gone, here):
        assert store.put(key, kv_of(1))
    with hung(server, store), pytest.raises(StoreError, match="forget again: no answer in time"):
        store.forget("acme/docs", frozenset({"chunk-1"}))
    assert store.get(gone) is None
    forget_at_last(store, "acme/docs", frozenset({"chunk-1"}))
    assert store.get(gone) is None
    assert store.get(here) is not None
    assert set(server.entries()) == {here.digest()}
    assert store.put(gone, kv_of(1))
    assert store.get(gone) is not None


def test_a_put_that_arrives_after_its_forget_is_refused(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung server still works off what lies in its socket when it goes on."""
    monkeypatch.setattr(deadlines, "FAILURES", 100)
    store, other = redis_store(server), redis_store(server)
    assert store.put(key_of(1), kv_of(1))
    with hung(server, store):
        assert not store.put(key_of(2), kv_of(2))
        with pytest.raises(StoreError, match="forget again"):
            store.forget("acme/docs")
    forget_at_last(store, "acme/docs")
    assert [other.get(key_of(number)) for number in (1, 2)] == [None, None]
    agrees(server, other)


def test_a_late_put_with_an_outdated_token_is_refused(server: RedisServer) -> None:
    """The same in one step: what another client forgot meanwhile."""
    ours, others = redis_store(server), redis_store(server)
    assert ours.put(KEY, kv_of(1))
    others.forget(KEY.namespace)
    backend = ours._backend
    asked = iter([True, False])
    assert backend.save(KEY, memoryview(b"late"), lambda: next(asked)) is None
    assert server.entries() == {}
    assert ours.put(KEY, kv_of(1)), "a put of later is kept"


def test_bad_arguments_say_what_to_do(server: RedisServer) -> None:
    with pytest.raises(ValueError, match="entry_bytes"):
        redis_store(server, entry_bytes=1 << 30)
    with pytest.raises(ValueError, match="openssl"):
        redis_store(server, key=None)
    with pytest.raises(ValueError, match="scheme"):
        RedisStore("localhost:6379", 1, key=KEY_BYTES, entry_bytes=1, deadline=1.0)
