"""A process that forks while other threads of it hold every lock of a remote tier."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_kit import booked_store, redis_store, running_server
from store_kit import KEY, contents, key_of, kv_of
from test_fsspec_store import opened

from ragcachekit.store.condition import Condition
from ragcachekit.store.process import PerProcess
from ragcachekit.store.remote_store import RemoteStore

LOCK = type(threading.Lock())


def locks(thing: object, seen: set[int]) -> Iterator[object]:
    """Every lock that hangs from an object of ours."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, LOCK | Condition):
        yield thing
    elif isinstance(thing, PerProcess):
        yield from locks(thing.get(), seen)
    elif type(thing).__module__.startswith("ragcachekit."):
        for part in vars(thing).values():
            yield from locks(part, seen)


def in_a_child(store: RemoteStore) -> bool:
    """Whether a child finds the entry, writes, counts and forgets while all locks are held here."""
    held, over = threading.Event(), threading.Event()
    all_locks = list(locks(store, set()))
    assert len(all_locks) >= 6

    def hold() -> None:
        for lock in all_locks:
            lock.acquire()  # type: ignore[attr-defined]
        held.set()
        over.wait(60)
        for lock in all_locks:
            lock.release()  # type: ignore[attr-defined]

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        good = False
        try:
            found = store.get(KEY)
            good = found is not None and contents(found.kv) == contents(kv_of(1))
            good = good and store.put(key_of(2), kv_of(2)) and store.stats()[0].hits == 2
            good = good and store.health.errors == 0
            good = good and store.forget(KEY.namespace) == 2 and store.get(KEY) is None
            store.close()
        finally:
            os._exit(0 if good else 1)
    over.set()
    holder.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that it is asked for is the point here
@pytest.mark.parametrize("kind", ["file", "books", "redis"])
def test_a_child_has_locks_of_its_own(kind: str, tmp_path: Path) -> None:
    if kind == "file":
        store: RemoteStore = opened(tmp_path)
        assert store.put(KEY, kv_of(1))
        assert store.get(KEY) is not None
        assert in_a_child(store)
        return
    with running_server() as server:
        store = redis_store(server) if kind == "redis" else booked_store(server, tmp_path.as_uri())
        assert store.put(KEY, kv_of(1))
        assert store.get(KEY) is not None
        assert in_a_child(store)
        store.close()
