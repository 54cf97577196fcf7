"""Quotas of the disk tier: a namespace over its own loses entries of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcachekit.store.disk import DiskStore
from store_kit import agrees_with_files, entry_size, filled, key_of, kv_of


def present(store: DiskStore, namespace: str, count: int = 12) -> list[int]:
    return [n for n in range(count) if key_of(n, namespace=namespace) in store]


@pytest.fixture
def size(tmp_path: Path) -> int:
    filled(tmp_path / "probe", 1)
    return entry_size(tmp_path / "probe") + 64  # names of namespaces differ in length


def test_a_namespace_over_its_quota_loses_its_own_oldest(tmp_path: Path, size: int) -> None:
    store = DiskStore(tmp_path / "kv", 100 * size, quotas={"small": 3 * size, "*": 5 * size})
    for number in range(4):
        assert store.put(key_of(number, namespace="other"), kv_of(number))
    for number in range(3):
        assert store.put(key_of(number, namespace="small"), kv_of(number))
    assert store.get(key_of(0, namespace="small")) is not None
    assert store.put(key_of(3, namespace="small"), kv_of(3))
    assert present(store, "small") == [0, 2, 3]
    for number in range(4, 8):
        assert store.put(key_of(number, namespace="other"), kv_of(number))
    assert present(store, "other") == [3, 4, 5, 6, 7]
    assert present(store, "small") == [0, 2, 3]
    assert store.stats()[0].evictions == 1 + 3
    assert agrees_with_files(store, tmp_path / "kv")
    store.close()


def test_an_entry_larger_than_its_quota_is_refused_and_harms_nobody(tmp_path: Path, size: int) -> None:
    store = DiskStore(tmp_path / "kv", 100 * size, quotas={"small": 2 * size})
    assert store.put(key_of(0, namespace="small"), kv_of(0))
    assert store.put(key_of(1, namespace="small"), kv_of(1, tokens=40)) is False
    assert store.put(key_of(1, namespace="other"), kv_of(1, tokens=40))
    assert present(store, "small") == [0]
    assert store.stats()[0].failed_writes == 1
    store.close()


def test_the_budget_holds_beside_quotas(tmp_path: Path, size: int) -> None:
    store = DiskStore(tmp_path / "kv", 4 * size, quotas={"small": 3 * size})
    for number in range(3):
        store.put(key_of(number, namespace="small"), kv_of(number))
        store.put(key_of(number, namespace="other"), kv_of(number))
    assert (present(store, "small"), present(store, "other")) == ([1, 2], [1, 2])
    store.close()


def test_a_smaller_quota_is_enforced_at_the_next_start(tmp_path: Path, size: int) -> None:
    store = DiskStore(tmp_path / "kv", 100 * size)
    for number in range(5):
        for namespace in ("small", "other"):
            assert store.put(key_of(number, namespace=namespace), kv_of(number))
    store.close()
    store = DiskStore(tmp_path / "kv", 100 * size, quotas={"small": 2 * size})
    assert (present(store, "small"), present(store, "other")) == ([3, 4], [0, 1, 2, 3, 4])
    assert agrees_with_files(store, tmp_path / "kv")
    store.close()
