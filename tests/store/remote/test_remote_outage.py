"""A server that is killed, hangs and comes back while requests run: each is answered, and in time."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ragcachekit.store import deadlines
from ragcachekit.store.remote import RemoteStore
from ragcachekit.types import KVKey
from redis_kit import RedisServer, failures_of, redis_store, running_server
from store_kit import contents, key_of, kv_of

DEADLINE = 0.1
KEYS = 15
LATE = 0.05


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_server(tcp=True) as server:
        yield server


class Requests:
    """Requests of a few threads over few keys, their answers checked and timed."""

    def __init__(
        self, store: RemoteStore, seed: int, before: Callable[[int], None] = lambda number: None
    ) -> None:
        self.store, self.before = store, before
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.answered = self.hits = self.started = 0
        self.wrong: list[object] = []
        self.longest = 0.0

    def run(self, requests: int, threads: int) -> None:
        workers = [threading.Thread(target=self.work, args=(requests,)) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def work(self, requests: int) -> None:
        while True:
            with self.lock:
                number, self.started = self.started, self.started + 1
                chunk, kind = self.random.randrange(KEYS), self.random.random()
            if number >= requests:
                return
            self.before(number)
            start = time.perf_counter()
            try:
                hit = self.request(key_of(chunk), chunk, kind)
            except BaseException as error:
                self.wrong.append(error)
                continue
            took = time.perf_counter() - start
            with self.lock:
                self.answered += 1
                self.hits += hit
                self.longest = max(self.longest, took)

    def request(self, key: KVKey, chunk: int, kind: float) -> bool:
        if kind < 0.3:
            return self.store.put(key, kv_of(chunk, tokens=32)) and False
        if kind < 0.4:
            return (key in self.store) and False
        found = self.store.get(key)
        if found is not None and contents(found.kv) != contents(kv_of(chunk, tokens=32)):
            self.wrong.append(key)
        return found is not None


class Turns:
    """Kills and restarts the server, then stops and continues it, in turn."""

    def __init__(self, server: RedisServer) -> None:
        self.ways = ((server.kill, server.start), (server.hang, server.go_on))
        self.random, self.count = random.Random(2), 0

    def until(self, over: threading.Event) -> None:
        while not over.wait(self.random.uniform(0.3, 0.8)):
            down, up = self.ways[self.count % 2]
            down()
            over.wait(self.random.uniform(0.1, 0.5))
            up()
            self.count += 1


def test_every_request_is_answered_through_an_outage(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without looking at the time: killed, back, hung, back, at fixed places among the requests."""
    monkeypatch.setattr(deadlines, "COOLDOWN", 0.0)
    store = redis_store(server, deadline=DEADLINE)
    failures = failures_of(store._executor)
    turns = {40: server.kill, 60: server.start, 100: server.hang, 110: server.go_on}
    requests = Requests(store, 1, lambda number: turns.get(number, lambda: None)())
    requests.run(200, 1)
    assert (requests.answered, requests.wrong) == (200, [])
    assert requests.hits > 0
    assert {"ConnectionError", "no answer within 0.1 s"} <= {reason.partition(":")[0] for reason in failures}
    assert store.put(key_of(0), kv_of(0, tokens=32))
    assert store.get(key_of(0)) is not None
    store.close()


@pytest.mark.soak
def test_killed_hung_and_restarted_during_a_thousand_requests(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None later than the deadline and 50 ms; ``pytest -s`` shows the figures."""
    monkeypatch.setattr(deadlines, "COOLDOWN", 0.1)
    store = redis_store(server, deadline=DEADLINE)
    failures = failures_of(store._executor)
    over, turns = threading.Event(), Turns(server)
    disturbing = threading.Thread(target=turns.until, args=(over,))
    disturbing.start()
    # Paced, or refusals at once would have them all done within the first outage.
    requests = Requests(store, 2, lambda number: time.sleep(0.02))
    requests.run(1_000, 2)
    over.set()
    disturbing.join()
    figures = f"{turns.count} turns, {requests.hits} hits, longest {requests.longest * 1e3:.1f} ms"
    sys.stdout.write(f"\n{figures}, {len(failures)} failures\n")
    assert (requests.answered, requests.wrong) == (1_000, [])
    assert turns.count >= 8
    assert requests.hits > 100
    assert "no answer within 0.1 s" in failures
    assert requests.longest <= DEADLINE + LATE
    store.close()
