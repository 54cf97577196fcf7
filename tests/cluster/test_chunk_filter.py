"""The filter that replicas publish: finds every id, few others, and survives its way as routing stats."""

from __future__ import annotations

import hashlib

import pytest

from ragcachekit.cluster.chunk_filter import ChunkFilter


def ids(count, salt):
    return [hashlib.sha256(f"{salt} {n}".encode()).hexdigest() for n in range(count)]


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 20_000])
def test_every_id_is_found(count):
    held = ids(count, "held")
    found = ChunkFilter.of(held)
    assert all(one in found for one in held)


@pytest.mark.parametrize("count", [100, 5000])
def test_others_are_found_in_one_of_a_hundred_cases(count):
    found = ChunkFilter.of(ids(count, "held"))
    wrong = sum(one in found for one in ids(20_000, "other"))
    assert wrong / 20_000 < 0.0125
    assert len(found.stats()["chunk_bits"]) <= 10 * count / 8 + 1


def test_an_empty_filter_holds_nothing():
    assert not any(one in ChunkFilter.of([]) for one in ids(1000, "other"))


def test_a_filter_of_too_many_ids_keeps_to_its_size_and_misses_none():
    held = ids(3000, "held")
    small = ChunkFilter.of(held, most_bytes=1000)
    assert len(small.stats()["chunk_bits"]) == 1000
    assert all(one in small for one in held)
    assert sum(one in small for one in ids(5000, "other")) < 2500


def test_stats_carry_the_filter():
    held = ids(50, "held")
    again = ChunkFilter.from_stats(ChunkFilter.of(held).stats())
    assert all(one in again for one in held)
    assert sum(one in again for one in ids(1000, "other")) < 30


@pytest.mark.parametrize(
    "stats", [{}, {"chunk_bits": b"", "chunk_hashes": 3}, {"chunk_bits": "x", "chunk_hashes": 3}]
)
def test_other_stats_are_no_filter(stats):
    assert ChunkFilter.from_stats(stats) is None
