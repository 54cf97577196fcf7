"""What a plan waits for a remote tier: with a clock and a service in the test's own hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ragcachekit.plan.lookup import Fetch
from ragcachekit.store import deadlines
from ragcachekit.store.entry import encode_entry
from ragcachekit.store.loader import Loader
from ragcachekit.store.memory import HostStore
from ragcachekit.store.remote import RemoteStore, Usage
from ragcachekit.store.seal import Seal
from ragcachekit.store.tiered import TieredStore
from store_kit import key_of, kv_of

KEY = b"a key for tests, nothing more"
SEAL = Seal(KEY)
DEADLINE = 60.0  # never reached: the seconds below are the clock's
CHUNKS = 20


class Slow:
    """Has every entry, and takes its time for each: a clock that goes on with every answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.loads = seconds, 0.0, 0

    def load(self, key: Any) -> bytes:
        self.loads += 1
        self.now += self.seconds
        return bytes(SEAL.sealed(key.digest(), encode_entry(key, kv_of(1))))

    def open(self) -> None:
        pass

    def usage(self) -> Usage:
        return Usage(0, 0)

    def close(self) -> None:
        pass


def tier(name: str, backend: Any) -> RemoteStore:
    return RemoteStore(name, backend, key=KEY, deadline=DEADLINE)


def tell_time(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=clock))


def hits(fetch: Fetch, begin: int = 0) -> int:
    return sum(fetch.get(key_of(number), 4) is not None for number in range(begin, begin + CHUNKS))


def test_all_look_ups_of_a_plan_wait_three_deadlines_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Slow(0.9 * DEADLINE)
    tell_time(monkeypatch, lambda: service.now)
    store = tier("slow", service)
    fetch = Fetch(store)
    assert hits(fetch) == 3
    assert service.now <= 3 * DEADLINE
    assert store.stats()[0].misses == CHUNKS - 3
    assert hits(fetch.without(frozenset([key_of(99)])), 50) == 0, "a plan that is made again has no more"
    assert service.loads == 3
    assert hits(Fetch(store)) == 3, "the next one has its own"
    assert sum(store.get(key_of(number)) is not None for number in range(CHUNKS)) == CHUNKS
    store.close()


def test_a_quick_service_is_asked_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Slow(0.01 * DEADLINE)
    tell_time(monkeypatch, lambda: service.now)
    store = tier("quick", service)
    assert hits(Fetch(store)) == CHUNKS
    store.close()


def test_tiers_are_counted_apart_and_memory_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty(Slow):
        def load(self, key: Any) -> Any:
            super().load(key)

    services = Empty(0.0), Slow(0.0)
    tell_time(monkeypatch, lambda: services[0].now + services[1].now)
    host, stores = HostStore(1 << 30), [tier(f"tier{n}", service) for n, service in enumerate(services)]
    loader = Loader(TieredStore([host, *stores]))
    for number in range(CHUNKS):
        assert host.put(key_of(1000 + number), kv_of(1))
    services[0].seconds, services[1].seconds = DEADLINE, DEADLINE / 4
    fetch = Fetch(loader)
    assert hits(fetch) == 9, "the slower one behind is asked for as long as its own time lasts"
    assert [service.loads for service in services] == [3, 9]
    assert hits(fetch, 1000) == CHUNKS
    loader.close()
    for store in stores:
        store.close()
