"""The bookkeeping of a query cache, checked against itself."""

from __future__ import annotations

import numpy as np

from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval

_LEFT = ("replacements", "evictions", "forgotten", "expired")


def check_cache(cache: ProximityCache) -> None:
    """Raise AssertionError if the bookkeeping contradicts itself: inserted = present + left."""
    with cache._lock:
        size, counts = cache._size, cache._counts
        left = sum(counts[name] for name in _LEFT)
        assert counts["inserts"] == size + left, "inserted is not present + left"
        assert size <= cache.capacity, "more entries than the capacity"
        ordered = list(cache._order)
        assert len(ordered) == len(set(ordered)) == size, "the eviction order differs in number"
        if cache.ttl is not None:
            assert set(cache._expiry._ends) == set(ordered), "the order of age has other entries"
        there = [stored for keys in cache._partitions.values() for stored in keys.stored]
        assert set(there) == set(ordered), "the partitions have other entries"
        for partition, keys in cache._partitions.items():
            matrix, leading = keys.matrix, keys.matrix._leading
            assert 0 < matrix.size == len(keys.stored) == len(keys._by_digest), "keys differ in number"
            assert keys.partition is partition, "a partition is stored twice"
            for slot, stored in enumerate(keys.stored):
                assert (stored.keys, stored.slot) == (keys, slot), "an entry points to another slot"
                assert stored.entry.partition is partition, "an entry has another partition"
                assert keys._by_digest[stored.digest] is stored, "a hash points to another entry"
                assert hash(matrix.rows[slot].tobytes()) == stored.digest, "a row has another key"
                assert matrix._serials[slot] == stored.serial, "a row has another number"
            if leading is not None:
                parts = leading.parts(matrix.rows[: matrix.size], matrix.squares[: matrix.size])
                assert np.array_equal(parts, leading._keys[: matrix.size]), "leading columns of another key"


def check_retrieval(retrieval: CachedRetrieval) -> None:
    """Raise AssertionError if documents are stored without an entry, or the cache contradicts itself."""
    check_cache(retrieval._entries.cache)
    named = [number for entry, _ in retrieval._entries.cache.entries() for number in entry.ids]
    assert sorted(named) == sorted(retrieval._entries.held), (
        "documents without an entry, or an entry without them"
    )
