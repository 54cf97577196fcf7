"""Any sequence of operations of three writers with common books, of damage, losses and outages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import ClassVar

import fsspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from redis_kit import KEY_BYTES, RedisServer, booked_store, running_server
from store_kit import contents, kv_of
from test_store_machine import BUDGET, KEYS

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.fsspec_store import FsspecStore
from ragcachekit.types import KVKey

keys = st.sampled_from(KEYS)
writers = st.integers(0, 2)
FS = fsspec.filesystem("memory")
QUOTA = {"globex": BUDGET // 2}


def sizes() -> dict[str, int]:
    """Digest → size, as they lie there."""
    found = FS.find("/booked", detail=True) if FS.exists("/booked") else {}
    return {
        path.rpartition("/")[2].removesuffix(".kv"): info["size"]
        for path, info in found.items()
        if path.endswith(".kv")
    }


class BooksMachine(RuleBasedStateMachine):
    """The oracle is a dict of what was last put, by whomever; a get gives that or nothing."""

    server: ClassVar[RedisServer]

    @initialize()
    def start(self) -> None:
        if FS.exists("/booked"):
            FS.rm("/booked", recursive=True)
        self.server.empty()
        self.up = True
        self.model: dict[KVKey, ChunkKV] = {}
        self.stores = [self.opened() for _ in range(3)]

    def opened(self, key: bytes = KEY_BYTES) -> FsspecStore:
        return booked_store(self.server, "memory://booked", BUDGET, key=key, quotas=QUOTA, cooldown=0.0)

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.close()
        if not getattr(self, "up", True):
            self.server.start()

    def settle(self) -> None:
        """What was forgotten while the server was down is told when it answers."""
        for store in self.stores:
            while store.pending_forgets:
                assert store.get(KEYS[0]) is None or KEYS[0] in self.model

    @rule(who=writers, key=keys, seed=st.integers(0, 99), tokens=st.integers(1, 16))
    def put(self, who: int, key: KVKey, seed: int, tokens: int) -> None:
        kv = kv_of(seed, tokens=tokens)
        kept = self.stores[who].put(key, kv)
        assert kept == self.up, "without books nothing is written"
        if kept:
            self.model[key] = kv
            assert all(key in store for store in self.stores)

    @rule(who=writers, key=keys)
    def put_too_large(self, who: int, key: KVKey) -> None:
        assert not self.stores[who].put(key, kv_of(0, tokens=200))

    @rule(who=writers, key=keys)
    def get(self, who: int, key: KVKey) -> None:
        found = self.stores[who].get(key)
        if found is not None:
            assert contents(found.kv) == contents(self.model[key])

    @rule(
        who=writers,
        namespace=st.sampled_from(["acme", "globex"]),
        ids=st.sets(st.sampled_from("abc")) | st.none(),
    )
    def forget(self, who: int, namespace: str, ids: set[str] | None) -> None:
        doomed = [
            key
            for key in self.model
            if key.namespace == namespace and (ids is None or key.chunk_id in ids or ids & set(key.context))
        ]
        present = len(sizes().keys() & {key.digest() for key in doomed})
        assert self.stores[who].forget(namespace, None if ids is None else frozenset(ids)) == present
        assert bool(self.stores[who].pending_forgets) == (not self.up)
        for key in doomed:
            del self.model[key]
            assert all(store.get(key) is None for store in self.stores)

    @rule(who=writers)
    def reopen(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = self.opened()

    @rule()
    def server_lost_everything(self) -> None:
        if self.up:
            self.server.empty()

    @rule()
    def server_stops_or_starts(self) -> None:
        self.up = not self.up
        if self.up:
            self.server.start()
            self.settle()
        else:
            self.server.kill()

    @rule(who=writers, draw=st.randoms(use_true_random=False), key=keys)
    def damage_and_read(self, who: int, draw: random.Random, key: KVKey) -> None:
        found = [path for path in FS.find("/booked") if key.digest() in path]
        if found and self.up:
            blob = bytearray(FS.cat_file(found[0]))
            blob[draw.randrange(60, len(blob))] ^= 1 << draw.randrange(8)
            FS.pipe_file(found[0], bytes(blob))
            assert self.stores[who].get(key) is None
            assert key.digest() not in sizes()

    @rule(key=keys)
    def object_is_gone(self, key: KVKey) -> None:
        for path in [path for path in FS.find("/booked") if key.digest() in path]:
            FS.rm_file(path)
            assert all(store.get(key) is None for store in self.stores)

    @rule()
    def books_come_to_agree(self) -> None:
        """Reads of what is not there, and nothing else, put right what the books know too much."""
        if not self.up:
            return
        while True:
            (stats,) = self.stores[0].stats()
            if (stats.entries, stats.nbytes) == (len(sizes()), sum(sizes().values())):
                return
            for key in KEYS:
                self.get(0, key)

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "stores"):
            return
        there = sizes()
        assert sum(there.values()) <= BUDGET
        globex = [there.get(key.digest(), 0) for key in KEYS if key.namespace == "globex"]
        assert sum(globex) <= QUOTA["globex"]

    @invariant()
    def books_know_of_every_byte(self) -> None:
        if getattr(self, "up", False):
            assert self.stores[0].stats()[0].nbytes >= sum(sizes().values())


TestBooksMachine = BooksMachine.TestCase
TestBooksMachine.settings = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@pytest.fixture(autouse=True, scope="module")
def _server() -> Iterator[None]:
    with running_server() as BooksMachine.server:
        yield
