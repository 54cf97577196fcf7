"""Many readers or one writer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ragcachekit.search.lock import ReadWriteLock

LONG = 10.0


def test_readers_share() -> None:
    lock, inside = ReadWriteLock(), threading.Barrier(3)

    def read() -> None:
        with lock.read():
            inside.wait(LONG)  # breaks unless all three are inside at once

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not inside.broken


def test_a_writer_is_alone() -> None:
    lock, state, seen = ReadWriteLock(), {"value": 0}, []

    def write() -> None:
        for _ in range(200):
            with lock.write():
                state["value"] += 1
                state["value"] += 1

    def read() -> None:
        for _ in range(200):
            with lock.read():
                seen.append(state["value"])

    threads = [threading.Thread(target=target) for target in (write, read, write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state["value"] == 800
    assert not any(value % 2 for value in seen)


def test_a_waiting_writer_goes_before_new_readers() -> None:
    lock, order, blocked = ReadWriteLock(), [], threading.Event()
    wait_for = lock._turn.wait_for

    def announced(ready: Callable[[], bool]) -> bool:
        blocked.set()  # the lock is held here, and the writer counts as waiting already
        return wait_for(ready)

    def write() -> None:
        with lock.write():
            order.append("write")

    def read() -> None:
        with lock.read():
            order.append("read")

    with lock.read():
        lock._turn.wait_for = announced  # type: ignore[method-assign]
        writer, reader = threading.Thread(target=write), threading.Thread(target=read)
        writer.start()
        assert blocked.wait(LONG)
        blocked.clear()
        reader.start()
        assert blocked.wait(LONG)
        assert order == []
    writer.join(LONG)
    reader.join(LONG)
    assert order == ["write", "read"]


def test_an_error_inside_lets_go() -> None:
    lock = ReadWriteLock()
    for hold in (lock.read, lock.write):
        with pytest.raises(KeyError), hold():
            raise KeyError
    with lock.write():
        assert lock._readers == 0
