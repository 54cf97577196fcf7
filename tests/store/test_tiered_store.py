"""Composition: promotion, fall-through, and no way back for what was forgotten."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from ragcachekit.errors import StoreError
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.memory import HostStore
from ragcachekit.store.quantised import QuantisedStore
from ragcachekit.store.tiered import TieredStore
from store_kit import KEY, key_of, kv_of

ONE = kv_of(0).nbytes


def test_memory_keys_are_those_in_memory(tmp_path):
    """Whatever tier rounds, and although a slow tier lists more."""
    host = QuantisedStore(HostStore(2 * ONE), "int8")
    store = TieredStore([host, DiskStore(tmp_path / "kv", 1 << 20)])
    for number in range(12):
        store.put(key_of(number), kv_of(number))
    listed = set(store.keys(in_memory=True))
    every = list(store.keys())
    assert listed == {key for key in every if store.in_memory(key)}
    assert 0 < len(listed) < len(every) == 12
    store.close()


class ForgetsWhileRead(HostStore):
    """A slow tier whose entry is forgotten by another caller just after it was read."""

    store: TieredStore | None = None

    def get(self, key, weight=1.0):
        found = super().get(key)
        if found is not None and self.store is not None:
            self.store.forget(key.namespace)
        return found


def test_a_read_under_way_does_not_bring_back_what_is_forgotten():
    fast, slow = HostStore(ONE), ForgetsWhileRead(ONE)
    slow.store = store = TieredStore([fast, slow])
    slow.put(KEY, kv_of(1))
    assert store.get(KEY) is not None
    assert KEY not in fast
    assert store.get(KEY) is None


class ReadDuringForget(HostStore):
    """A fast tier in which, while it is being cleared, another caller reads through the store."""

    store: TieredStore | None = None

    def drop(self, namespace, chunk_ids=None):
        assert self.store is not None
        self.store.get(KEY)
        dropped = super().drop(namespace, chunk_ids)
        self.store.get(KEY)
        return dropped


def test_a_read_during_forget_does_not_bring_it_back_either():
    fast, slow = ReadDuringForget(ONE), HostStore(ONE)
    fast.store = store = TieredStore([fast, slow])
    slow.put(KEY, kv_of(1))
    assert store.forget("acme/docs") == 1
    assert KEY not in fast
    assert store.get(KEY) is None


def test_what_another_process_forgot_is_not_handed_back_to_the_shared_disk(tmp_path):
    ours, theirs = (TieredStore([HostStore(ONE), DiskStore(tmp_path / "kv", 1 << 20)]) for _ in range(2))
    ours.put(KEY, kv_of(1))
    assert theirs.get(KEY) is not None  # and keeps it in its own host memory
    assert ours.forget("acme/docs") == 1
    theirs.put(key_of(2, namespace="globex"), kv_of(2))
    assert KEY not in theirs
    assert ours.get(KEY) is None
    ours.close()
    theirs.close()


class Remote(HostStore):
    """Says that it is on another machine, and notes what it is asked."""

    shared = True
    remote = True

    def __init__(self, budget):
        super().__init__(budget)
        self.asked: list[str] = []

    def get(self, key, weight=1.0):
        self.asked.append("get")
        return super().get(key, weight)

    def admit(self, key, kv):
        self.asked.append("admit")
        return super().admit(key, kv)

    def __contains__(self, key):
        self.asked.append("contains")
        return super().__contains__(key)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_hit_below_a_remote_tier_asks_it_once(quantised):
    fast, slow, redis = HostStore(ONE), HostStore(9 * ONE), Remote(9 * ONE)
    store = TieredStore([fast, QuantisedStore(redis, "int8") if quantised else redis, slow])
    slow.put(KEY, kv_of(1))
    assert store.get(KEY) is not None
    assert KEY in fast
    assert redis.asked == ["get"]
    redis.asked.clear()
    assert store.put(key_of(2), kv_of(2))  # evicts KEY from the fast tier
    assert redis.asked == ["admit"]
    assert KEY not in fast
    assert redis.stats()[0].entries == 1


class Held(HostStore):
    """A fast tier in which writing an entry takes until it is let go."""

    def __init__(self, budget):
        super().__init__(budget)
        self.began, self.go_on = Event(), Event()

    def admit(self, key, kv):
        self.began.set()
        assert self.go_on.wait(60)
        return super().admit(key, kv)


def test_a_forget_waits_for_a_move():
    fast, slow = Held(9 * ONE), HostStore(9 * ONE)
    store = TieredStore([fast, slow])
    slow.put(KEY, kv_of(1))
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(store.get, KEY)
        assert fast.began.wait(60)
        forgetting = threads.submit(store.forget, "acme/docs")
        fast.go_on.set()
        assert reading.result(60) is not None
        assert forgetting.result(60) == 1
    assert KEY not in fast


class CannotForget(HostStore):
    """A tier that raises when it is told to forget."""

    def drop(self, namespace, chunk_ids=None):
        raise StoreError("cannot forget now")


def test_a_tier_that_cannot_forget_keeps_no_other_from_hearing_of_it():
    before, behind = HostStore(1 << 20), HostStore(1 << 20)
    store = TieredStore([before, CannotForget(1 << 20), CannotForget(1 << 20), behind])
    store.put(KEY, kv_of(1))
    with pytest.raises(StoreError, match="cannot forget now"):
        store.forget(KEY.namespace)
    assert (KEY in before, KEY in behind) == (False, False)
    store.close()
