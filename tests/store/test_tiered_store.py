"""Composition: promotion, fall-through, and no way back for what was forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_kit import KEY, contents, key_of, kv_of

from ragcachekit.store.base import Found
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.host import HostStore
from ragcachekit.store.tiered import TieredStore
from ragcachekit.types import KVKey

ONE = kv_of(0).nbytes


def test_a_disk_hit_moves_up_to_the_host(tmp_path: Path) -> None:
    host, disk = HostStore(2 * ONE), DiskStore(tmp_path / "kv", 1 << 20)
    store = TieredStore([host, disk])
    for number in range(4):
        assert store.put(key_of(number), kv_of(number))
    assert [key_of(n) in host for n in range(4)] == [False, False, True, True]
    tiers = []
    for _ in range(2):
        found = store.get(key_of(0))
        assert found is not None
        assert contents(found.kv) == contents(kv_of(0))
        tiers.append(found.tier)
    assert tiers == ["disk", "host"]
    assert [key_of(n) in host for n in range(4)] == [True, False, False, True]
    store.close()


def test_what_one_tier_refuses_another_keeps(tmp_path: Path) -> None:
    store = TieredStore([HostStore(ONE - 1), DiskStore(tmp_path / "kv", 1 << 20)])
    assert store.put(KEY, kv_of(1)) is True
    found = store.get(KEY)
    assert found is not None
    assert found.tier == "disk"
    store.close()


def test_an_entry_in_both_tiers_is_forgotten_once(tmp_path: Path) -> None:
    store = TieredStore([HostStore(ONE), DiskStore(tmp_path / "kv", 1 << 20)])
    store.put(key_of(1), kv_of(1))
    store.put(key_of(2), kv_of(2))
    assert store.forget("acme/docs") == 2
    assert [s.entries for s in store.stats()] == [0, 0]
    store.close()


def test_a_restart_finds_the_entries_on_disk(tmp_path: Path) -> None:
    first = TieredStore([HostStore(ONE), DiskStore(tmp_path / "kv", 1 << 20)])
    first.put(KEY, kv_of(1, start=0))
    first.close()
    second = TieredStore([HostStore(ONE), DiskStore(tmp_path / "kv", 1 << 20)])
    found = second.get(KEY)
    assert found is not None
    assert (found.tier, contents(found.kv)) == ("disk", contents(kv_of(1, start=0)))
    second.close()


class ForgetsWhileRead(HostStore):
    """A slow tier whose entry is forgotten by another caller just after it was read."""

    store: TieredStore | None = None

    def get(self, key: KVKey, worth: float = 1.0) -> Found | None:
        found = super().get(key)
        if found is not None and self.store is not None:
            self.store.forget(key.namespace)
        return found


def test_a_read_under_way_does_not_bring_back_what_is_forgotten() -> None:
    fast, slow = HostStore(ONE), ForgetsWhileRead(ONE)
    slow.store = store = TieredStore([fast, slow])
    slow.put(KEY, kv_of(1))
    assert store.get(KEY) is not None
    assert KEY not in fast
    assert store.get(KEY) is None


class ReadDuringForget(HostStore):
    """A fast tier in which, while it is being cleared, another caller reads through the store."""

    store: TieredStore | None = None

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        assert self.store is not None
        self.store.get(KEY)
        dropped = super().drop(namespace, chunk_ids)
        self.store.get(KEY)
        return dropped


def test_a_read_during_forget_does_not_bring_it_back_either() -> None:
    fast, slow = ReadDuringForget(ONE), HostStore(ONE)
    fast.store = store = TieredStore([fast, slow])
    slow.put(KEY, kv_of(1))
    assert store.forget("acme/docs") == 1
    assert KEY not in fast
    assert store.get(KEY) is None


def test_no_tiers_is_an_error() -> None:
    with pytest.raises(ValueError, match="NullStore"):
        TieredStore([])
