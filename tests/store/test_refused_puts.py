"""A put that was refused is not found afterwards, in any tier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.memory.host import HostStore
from ragcachekit.store.remote.base import Saved, Usage
from ragcachekit.store.remote.deadlines import DeadlineExecutor
from ragcachekit.store.remote.remote_store import RemoteStore
from ragcachekit.store.remote.seal import Seal
from ragcachekit.store.tiered import TieredStore
from ragcachekit.types import KVKey
from store_kit import KEY, kv_of, opened


def test_what_one_tier_cannot_write_down_is_in_no_other(tmp_path: Path) -> None:
    host = HostStore(1 << 20)
    store = TieredStore([host, opened(tmp_path / "kv")])
    kv = kv_of(1)
    complex_kv = ChunkKV(tuple(k.to(torch.complex64) for k in kv.keys), kv.values)
    with pytest.raises(TypeError, match="cannot be stored"):
        store.put(KEY, complex_kv)
    assert KEY not in store
    assert host.stats()[0].entries == 0
    store.close()


class SlowToSave:
    """Waits for ``go`` before, or after, an entry is there."""

    def __init__(self, before: bool) -> None:
        self.before, self.go, self.ended = before, threading.Event(), threading.Event()
        self.saved: dict[KVKey, bytes] = {}

    def save(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> Saved:
        if self.before:
            assert self.go.wait(30)
        kept = wanted()
        if kept:
            self.saved[key] = bytes(blob)
        if not self.before:
            assert self.go.wait(30)
        if not kept:
            self.ended.set()
        return Saved(kept)

    def load(self, key: KVKey) -> bytes | None:
        return self.saved.get(key)

    def delete(self, key: KVKey) -> None:
        del self.saved[key]
        self.ended.set()

    def exists(self, key: KVKey) -> bool:
        return key in self.saved

    def usage(self) -> Usage:
        return Usage(0, 0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("before", [True, False])
def test_what_a_service_saves_too_late_is_deleted_again(before: bool) -> None:
    backend = SlowToSave(before)
    store = RemoteStore(
        "slow", backend, Seal(b"a key for tests, nothing more"), DeadlineExecutor("slow", 0.05), 1 << 30
    )
    assert not store.put(KEY, kv_of(1))
    backend.go.set()
    assert backend.ended.wait(30)
    assert backend.saved == {}
    store.close()


@pytest.mark.parametrize("before", [True, False])
def test_what_was_kept_before_stays_when_the_same_comes_too_late(before: bool) -> None:
    backend = SlowToSave(before)
    store = RemoteStore(
        "slow", backend, Seal(b"a key for tests, nothing more"), DeadlineExecutor("slow", 0.2), 1 << 30
    )
    backend.go.set()
    assert store.put(KEY, kv_of(1))
    backend.go.clear()
    assert not store.put(KEY, kv_of(1))
    backend.go.set()
    store.close()
    assert KEY in backend.saved
