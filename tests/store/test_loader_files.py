"""Which files a loader keeps open: those of handles that somebody has, and not all the process may have."""

import gc
import os
import threading

import pytest

from loading_kit import WAIT, SlowStore
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.loader import Loader
from store_kit import key_of, kv_of


def filled(store, entries):
    for number in range(entries):
        assert store.put(key_of(number), kv_of(number))
    return store


def opened(loader, *numbers):
    return [loader.open(key_of(number)).kv for number in numbers]


@pytest.fixture
def store():
    return filled(SlowStore(), 8)


@pytest.fixture
def loader(store):
    with_threads = Loader(store)
    yield with_threads
    with_threads.close()


def closed(store):
    return [source.closed for source in store.sources]


def test_the_file_of_a_dropped_handle_is_closed_with_the_next_call(store, loader):
    first, second = opened(loader, 0, 1)
    again = loader.open(key_of(0)).kv
    del first
    assert closed(store) == [False, False]
    del again
    assert loader.open(key_of(9)) is None
    assert closed(store) == [True, False]
    loader.release([second])
    assert closed(store) == [True, True]


def test_of_the_disk_no_descriptor_is_left(tmp_path):
    def descriptors():
        names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.readlink(name).startswith(str(tmp_path)) for name in names if os.path.exists(name))

    loader = Loader(filled(DiskStore(tmp_path, 1 << 20), 3))
    handles = opened(loader, 0, 1, 2)
    assert descriptors() == 3
    handles.clear()
    loader.release([])
    assert descriptors() == 0
    loader.close()


def test_whoever_collects_garbage_while_the_loader_changes_disturbs_nothing(store, loader):
    """A handle in a cycle goes at any moment: here while this thread, or another one, holds the lock."""
    for meanwhile in (lambda: gc.collect(), lambda: in_another_thread(gc.collect)):
        cycle = [*opened(loader, 0, 1)]
        cycle.append(cycle)
        del cycle
        with loader._changed:
            seen = []
            for load in loader._active:
                meanwhile()
                seen.append(load.key)
            assert seen == [key_of(0), key_of(1)]
        assert loader.open(key_of(2)) is not None
        loader.release([])
        assert all(closed(store)), "the last one too: nobody kept it"


def in_another_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_no_more_entries_are_open_than_may_be(store, loader, monkeypatch):
    monkeypatch.setattr("ragcachekit.store.loader.MAX_OPEN", 3)
    handles = opened(loader, 0, 1, 2)
    assert loader.open(key_of(3)) is None
    assert loader.open(key_of(0)) is not None, "it is open"
    assert closed(store) == [False, False, False, True]
    handles.pop()
    assert loader.open(key_of(3)) is not None
