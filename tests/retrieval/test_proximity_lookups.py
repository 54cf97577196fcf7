"""Lookups with a condition, and of entries that expire."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ragcachekit.retrieval.proximity import Entry, ProximityCache

RNG = np.random.default_rng(9)


def test_what_is_not_accepted_is_a_miss_and_no_use() -> None:
    cache = ProximityCache(2, 1.0, "l2", "lru")
    cache.insert([0.0], ["near"], partition="p")
    cache.insert([0.7], ["second"], partition="p")
    asked: list[Entry] = []
    for query in ([0.1], [0.0]):
        assert cache.lookup(query, partition="p", accept=lambda entry: bool(asked.append(entry))) is None
    assert asked == [Entry("p", ("near",))] * 2  # the nearest only
    assert (cache.stats().hits, cache.stats().misses) == (0, 2)
    assert cache.insert([9.0], ["new"], partition="p") == (Entry("p", ("near",)),)
    assert cache.lookup([0.7], partition="p", accept=lambda entry: entry.ids == ("second",)) is not None
    assert cache.lookup([50.0], partition="p", accept=lambda entry: pytest.fail("nothing is near")) is None


def test_an_expired_entry_is_a_miss_and_leaves() -> None:
    now = [100.0]
    cache = ProximityCache(3, 1.0, "l2", "lru", ttl=10.0, clock=lambda: now[0])
    cache.insert([0.0], ["a"], partition="p")
    now[0] += 6
    cache.insert([0.5], ["b"], partition="p")
    assert cache.lookup([0.0], partition="p") == (("a",), 0.0)  # which does not prolong it
    now[0] += 4
    assert cache.lookup([0.0], partition="p") == (("b",), 0.5)  # the nearest of those that are left
    assert (len(cache), cache.stats().expired) == (1, 1)
    cache.check()
    assert cache.insert([0.5], ["c"], partition="p") == (Entry("p", ("a",)), Entry("p", ("b",)))
    assert (cache.stats().expired, cache.stats().replacements) == (1, 1)
    now[0] += 10
    assert cache.entries() == []
    assert cache.lookup([0.5], partition="p") is None
    assert cache.forget(lambda entry: pytest.fail("it expired")) == (Entry("p", ("c",)),)
    assert cache.insert([0.5], ["d"], partition="p") == ()
    cache.check()


def test_expired_entries_make_room_before_others_are_evicted() -> None:
    now = [0.0]
    cache = ProximityCache(2, 0.0, "l2", ttl=10.0, clock=lambda: now[0])
    cache.insert([1.0], ["old"], partition="p")
    now[0] += 9
    cache.insert([2.0], ["young"], partition="p")
    now[0] += 1
    assert cache.insert([3.0], ["new"], partition="p") == (Entry("p", ("old",)),)
    assert (cache.stats().evictions, cache.stats().expired) == (0, 1)


def test_entries_are_copies_in_the_order_in_which_they_leave() -> None:
    cache = ProximityCache(3, 0.0, "cosine", "lru")
    vectors = RNG.standard_normal((3, 8)).astype(np.float32)
    for number, vector in enumerate(vectors):
        cache.insert(vector, [number], partition=number % 2)
    assert cache.lookup(vectors[0], partition=0)
    entries = cache.entries()
    assert [entry for entry, _ in entries] == [Entry(1, (1,)), Entry(0, (2,)), Entry(0, (0,))]
    for entry, embedding in entries:
        assert np.array_equal(embedding, vectors[entry.ids[0]])
        embedding[:] = 9
    assert cache.lookup(vectors[1], partition=1) == ((1,), 0.0)


def test_threads_with_expiry_and_conditions_lose_nothing() -> None:
    cache = ProximityCache(32, 1e-6, "cosine", "lru", ttl=1e-4)
    vectors = RNG.standard_normal((64, 16)).astype(np.float32)
    left: list[Entry] = []

    def work(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, 64, 400).tolist():
            hit = cache.lookup(vectors[number], partition=0, accept=lambda entry: entry.ids[0] % 5 > 0)
            assert hit is None or hit.ids == (number,)
            if hit is None:
                left.extend(cache.insert(vectors[number], [number], partition=0))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left.extend(cache.clear())
    stats = cache.stats()
    assert stats.inserts == len(left)
    assert stats.hits + stats.misses == 5 * 400
    cache.check()
