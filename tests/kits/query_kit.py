"""The bookkeeping of a query cache, checked against itself."""

from __future__ import annotations

from collections import Counter

from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval


def check_cache(cache: ProximityCache) -> None:
    """Raise AssertionError if the bookkeeping contradicts itself: inserted = present + left."""
    with cache._lock:
        size, counts = len(cache._keys), cache._counts
        left = counts["replacements"] + counts["evictions"] + counts["forgotten"]
        assert counts["inserts"] == size + left, "inserted is not present + left"
        assert size <= cache.capacity, "more entries than the capacity"
        assert len(cache._entries) == size == len(cache._slots), "slots, keys and ids differ in number"
        assert Counter(entry.partition for entry in cache._entries) == {
            partition: group.entries for partition, group in cache._partitions.items()
        }, "entries of partitions"
        for slot, (code, vector) in enumerate(cache._keys):
            group = cache._partitions[cache._entries[slot].partition]
            assert cache._entries[slot].partition is group.partition, "a partition is stored twice"
            assert cache._slots[code, vector] == slot, "a key points to another slot"
            assert code == group.code, "a key has another partition's code"
            assert cache._matrix is not None
            row = cache._matrix._rows[slot].tobytes(), cache._matrix._codes[slot]
            assert row == (vector, code), "a row has another key or partition"


def check_retrieval(retrieval: CachedRetrieval) -> None:
    """Raise AssertionError if documents are stored without an entry, or the cache contradicts itself."""
    check_cache(retrieval._entries.cache)
    named = [number for entry in retrieval._entries.cache._entries for number in entry.ids]
    assert sorted(named) == sorted(retrieval._entries.held), (
        "documents without an entry, or an entry without them"
    )
