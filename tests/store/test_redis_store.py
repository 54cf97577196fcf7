"""The Redis tier: what several clients share, what the server may do to us, what outlives its absence."""

import logging
import random
import threading
import time
from contextlib import contextmanager
from typing import ClassVar

import pytest
from hypothesis.stateful import rule
from test_store_machine import KEYS, RemoteMachine, few

from ragcachekit.errors import StoreError
from ragcachekit.store import remote
from redis_kit import RedisServer, forget_at_last, redis_store, running_server
from soak_kit import figures
from store_kit import KEY, contents, key_of, kv_of

SHORT = 0.05  # seconds that a test waits for a server that hangs


@pytest.fixture(scope="module")
def running():
    with running_server() as server:
        yield server


@pytest.fixture
def server(running):
    running.empty()
    running.client.config_set("maxmemory", 0)
    running.client.config_set("maxmemory-policy", "noeviction")
    return running


@pytest.fixture
def mortal():
    """A server of one test's own, to be killed."""
    with running_server(tcp=True) as server:
        yield server


def test_clients_share_entries_and_forgets(server):
    one, two = redis_store(server), redis_store(server)
    for number in range(10):
        assert (one, two)[number % 2].put(key_of(number), kv_of(number))
    assert one.put(key_of(20, context=("chunk-3",)), kv_of(20))
    for number in range(10):
        found = (two, one)[number % 2].get(key_of(number))
        assert contents(found.kv) == contents(kv_of(number))
    assert one.stats()[0].entries >= 11
    assert two.forget("acme/docs", frozenset({"chunk-3"})) == 2
    assert one.get(key_of(3)) is None
    assert one.forget("globex") == 0
    assert one.forget("acme/docs") == 9
    assert server.entries() == {}


def test_the_server_evicts_the_least_recently_used(server):
    store = redis_store(server)
    kv = kv_of(1, tokens=400)
    used = int(server.client.info("memory")["used_memory"])
    server.client.config_set("maxmemory", used + 40 * kv.nbytes)
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    for number in range(200):
        assert store.put(key_of(number), kv)
        (stats,) = store.stats()
        assert 0 < stats.nbytes <= 1.1 * stats.budget
    kept = [number for number in range(200) if store.get(key_of(number)) is not None]
    assert 5 < len(kept) < 60
    assert kept[-1] == 199
    assert store.forget("acme/docs") == len(kept)


def test_a_full_server_that_does_not_evict_refuses(server, caplog):
    with caplog.at_level(logging.WARNING):
        store = redis_store(server)
    assert "maxmemory-policy allkeys-lru" in caplog.text
    assert store.put(key_of(1), kv_of(1))
    server.client.config_set("maxmemory", 1 << 20)
    assert not store.put(key_of(2), kv_of(2))
    assert store.stats()[0].failed_writes == 1
    assert store.get(key_of(1)) is not None


def test_a_dead_server_is_no_error_from_opening_on(mortal, clock):
    mortal.kill()
    store = redis_store(mortal)
    assert not store.put(KEY, kv_of(1))
    assert store.get(KEY) is None
    assert KEY not in store
    with pytest.raises(StoreError, match="the redis tier may hold"):
        store.forget("acme/docs")
    assert store.stats()[0].entries == 0
    mortal.start()
    assert store.get(KEY) is None, "left alone during the cool-down"
    clock.now += 6
    assert store.forget("acme/docs") == 0
    assert store.put(KEY, kv_of(1))
    assert store.get(KEY) is not None


@contextmanager
def hung(server):
    server.hang()
    try:
        yield
    finally:
        server.go_on()


@pytest.mark.usefixtures("patient")
def test_a_forget_during_an_absence_is_an_error(server):
    store, other = redis_store(server, deadline=SHORT), redis_store(server)
    gone, here = key_of(1), key_of(2)
    for key in (gone, here):
        assert other.put(key, kv_of(1))
    with hung(server), pytest.raises(StoreError, match="forget again"):
        store.forget("acme/docs", frozenset({"chunk-1"}))
    assert store.get(gone) is None
    assert not store.put(gone, kv_of(1)), "until a forget succeeds"
    forget_at_last(store, "acme/docs", frozenset({"chunk-1"}))
    assert (other.get(gone), other.get(here) is not None) == (None, True)
    while not store.put(gone, kv_of(1)):
        pass


def test_a_late_put_with_an_outdated_token_is_refused(server):
    """A hung server works off what lies in its socket when it goes on, also after a later forget."""
    ours, others = redis_store(server), redis_store(server)
    assert ours.write_blob(KEY, memoryview(b"early"), lambda: True)
    for lost in (lambda: others.forget(KEY.namespace), server.empty):
        lost()
        assert not ours.write_blob(KEY, memoryview(b"late"), iter([True, False]).__next__)
        assert server.entries() == {}
        assert ours.write_blob(KEY, memoryview(b"of later"), lambda: True)


class Requests:
    """Requests of a few threads over few keys, their answers checked and timed."""

    def __init__(self, store, seed, before):
        self.store, self.before, self.random = store, before, random.Random(seed)
        self.lock = threading.Lock()
        self.answered = self.hits = self.started = 0
        self.wrong: list[object] = []
        self.longest = 0.0

    def run(self, requests, threads):
        workers = [threading.Thread(target=self.work, args=(requests,)) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def work(self, requests):
        while True:
            with self.lock:
                number, self.started = self.started, self.started + 1
                chunk, kind = self.random.randrange(15), self.random.random()
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
                self.answered, self.hits = self.answered + 1, self.hits + hit
                self.longest = max(self.longest, took)

    def request(self, key, chunk, kind):
        if kind < 0.3:
            return self.store.put(key, kv_of(chunk, tokens=32)) and False
        if kind < 0.4:
            return (key in self.store) and False
        found = self.store.get(key)
        if found is not None and contents(found.kv) != contents(kv_of(chunk, tokens=32)):
            self.wrong.append(key)
        return found is not None


def test_every_request_is_answered_through_an_outage(mortal, monkeypatch):
    """Without looking at the time: killed, back, hung, back, at fixed places among the requests."""
    monkeypatch.setattr(remote, "COOLDOWN", 0.0)
    store = redis_store(mortal, deadline=0.1)
    turns = {40: mortal.kill, 60: mortal.start, 100: mortal.hang, 110: mortal.go_on}
    requests = Requests(store, 1, lambda number: turns.get(number, int)())
    requests.run(200, 1)
    assert (requests.answered, requests.wrong) == (200, [])
    assert requests.hits > 0
    assert store.put(key_of(0), kv_of(0, tokens=32))
    assert store.get(key_of(0)) is not None
    store.close()


@pytest.mark.soak
def test_killed_hung_and_restarted_during_a_thousand_requests(mortal, monkeypatch):
    """None later than the deadline and 50 ms."""
    monkeypatch.setattr(remote, "COOLDOWN", 0.1)
    store, over, turns = redis_store(mortal, deadline=0.1), threading.Event(), [0]

    def disturb():
        drawn, ways = random.Random(2), ((mortal.kill, mortal.start), (mortal.hang, mortal.go_on))
        while not over.wait(drawn.uniform(0.3, 0.8)):
            down, up = ways[turns[0] % 2]
            down()
            over.wait(drawn.uniform(0.1, 0.5))
            up()
            turns[0] += 1

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    # Paced, or refusals at once would have them all done within the first outage.
    requests = Requests(store, 2, lambda number: time.sleep(0.02))
    requests.run(1_000, 2)
    over.set()
    disturbing.join()
    figures("redis outage", turns=turns[0], hits=requests.hits, longest_ms=requests.longest * 1e3)
    assert (requests.answered, requests.wrong) == (1_000, [])
    assert turns[0] >= 8
    assert requests.hits > 100
    assert requests.longest <= 0.15
    store.close()


class RedisMachine(RemoteMachine):
    bounded = False
    server: ClassVar[RedisServer]

    def open(self):
        self.server.empty()
        return self.opened()

    def opened(self, **changes):
        return redis_store(self.server, entry_bytes=12_000, **changes)

    def blobs(self):
        return self.server.entries()

    def put_blob(self, key, blob):
        self.server.client.set(self.server.name_of(key), blob)

    @rule()
    def server_lost_everything(self):
        self.server.empty()
        assert not any(key in self.store for key in KEYS)


TestRedisMachine = RedisMachine.TestCase
TestRedisMachine.settings = few(6, 25)


@pytest.fixture(autouse=True, scope="module")
def _server(running):
    RedisMachine.server = running
