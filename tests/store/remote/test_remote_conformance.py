"""The promises of every store, run over the remote ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_store_conformance import (  # noqa: F401
    BUDGET,
    test_budget_holds_and_the_newest_stays,
    test_closed_store_misses,
    test_counters,
    test_entry_larger_than_the_budget_is_refused_and_harms_nobody,
    test_fifteen_other_identities_never_hit,
    test_forget_follows_chunks_and_contexts_within_the_namespace,
    test_forgetting_everything_frees_every_byte,
    test_identities_live_beside_each_other,
    test_is_a_kv_store,
    test_last_put_under_a_key_wins_and_counts_once,
    test_round_trip_is_byte_identical,
    test_sliced_and_transposed_tensors_are_kept_as_they_look,
    test_threads_see_a_value_or_a_miss,
    test_unknown_key_is_a_counted_miss,
)

from ragcachekit.store.base import KVStore
from ragcachekit.store.fsspec_store import FsspecStore
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import TieredStore
from redis_kit import KEY_BYTES, RedisServer, redis_store, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_server() as running:
        yield running


@pytest.fixture(params=["redis", "memory", "file", "host and file", "redis and file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    if request.param == "redis":
        server = request.getfixturevalue("server")
        server.empty()
        store: KVStore = redis_store(server, budget=BUDGET)
    else:
        url = f"memory://{tmp_path}" if request.param == "memory" else tmp_path.as_uri()
        store = bulk = FsspecStore(url, BUDGET, key=KEY_BYTES, deadline=20)
        if request.param == "host and file":
            store = TieredStore([HostStore(BUDGET // 4), bulk])
        elif request.param == "redis and file":
            server = request.getfixturevalue("server")
            server.empty()
            store = TieredStore([redis_store(server, budget=BUDGET // 2), bulk])
    yield store
    store.close()


@pytest.fixture
def any_store(store: KVStore) -> KVStore:
    return store
