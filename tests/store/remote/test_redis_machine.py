"""Any sequence of operations, damage and restarts against a dict, with sums taken by another client."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_store_machine import BUDGET, KEYS, StoreMachine

from ragcachekit.store.base import KVStore
from ragcachekit.types import KVKey
from redis_kit import RedisServer, redis_store, running_server

keys = st.sampled_from(KEYS)


class RedisMachine(StoreMachine):
    server: ClassVar[RedisServer]

    def open(self) -> KVStore:
        self.server.empty()
        return redis_store(self.server, budget=BUDGET)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = redis_store(self.server, budget=BUDGET)

    @rule()
    def server_lost_everything(self) -> None:
        self.server.empty()

    @rule(draw=st.randoms(use_true_random=False), key=keys)
    def damage_and_read(self, draw: random.Random, key: KVKey) -> None:
        entries = self.server.entries()
        blob = bytearray(entries.get(key.digest(), b""))
        if blob:
            place = draw.randrange(len(blob))
            blob[place] ^= 1 << draw.randrange(8)
            others = [other for name, other in entries.items() if name != key.digest()]
            put = draw.choice([bytes(blob), bytes(blob[:place]), b"", *others])
            self.server.client.set("{ragcachekit}:e:" + key.digest(), put)
            assert self.store.get(key) is None
            if key in self.store:  # one that seems to be another deployment's stays; its sizes must agree
                self.store.forget(key.namespace)
                self.model = {k: kv for k, kv in self.model.items() if k.namespace != key.namespace}

    @rule(key=keys)
    def another_deployment_never_hits(self, key: KVKey) -> None:
        other = redis_store(self.server, budget=BUDGET, key=b"the key of somebody else")
        assert other.get(key) is None
        other.close()

    @invariant()
    def sums_are_those_of_the_entries(self) -> None:
        if not hasattr(self, "store"):
            return
        sizes = {digest: len(blob) for digest, blob in self.server.entries().items()}
        (stats,) = self.store.stats()
        assert (stats.entries, stats.nbytes) == (len(sizes), sum(sizes.values()))
        assert self.server.sums().get("all", 0) == sum(sizes.values())
        client = self.server.client
        for order in client.keys("*:use"):
            assert {name.decode() for name in client.zrange(order, 0, -1)} == set(sizes)
        members = [m.decode() for name in client.keys("*:ns:*") for m in client.zrange(name, 0, -1)]
        assert sorted(members) == sorted(sizes)
        assert {m.decode() for name in client.keys("*:id:*") for m in client.smembers(name)} == set(sizes)


TestRedisMachine = RedisMachine.TestCase
TestRedisMachine.settings = settings(
    max_examples=10,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@pytest.fixture(autouse=True, scope="module")
def _server() -> Iterator[None]:
    with running_server() as RedisMachine.server:
        yield
