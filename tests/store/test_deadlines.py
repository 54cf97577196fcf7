"""Deadlines, the breaker, threads that hang: with a clock and operations in the test's own hand."""

import threading

import pytest

from ragcachekit.store import remote
from ragcachekit.store.remote import DeadlineExecutor

SHORT, LONG = 0.02, 60.0


class Hanging:
    """An operation that ends when told to, counting how many are in it."""

    def __init__(self):
        self.go_on = threading.Event()
        self.inside = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def __call__(self):
        self.inside.release()
        self.go_on.wait(LONG)
        self.ended.release()
        return "late"


@pytest.fixture
def hanging():
    hanging = Hanging()
    yield hanging
    hanging.go_on.set()


def threads_of(name):
    return [thread for thread in threading.enumerate() if thread.name == f"ragcachekit-{name}"]


def failing():
    raise ConnectionError("refused")


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_no_error_reaches_the_caller(error):
    def operation():
        raise error("no")

    guard = DeadlineExecutor("test", LONG)
    assert guard.run(operation, "default") == "default"
    assert guard.run(lambda: "next", "default") == "next"


def test_a_late_operation_is_given_up_and_counted(hanging):
    guard = DeadlineExecutor("test", SHORT)
    assert guard.run(hanging, "default") == "default"
    hanging.go_on.set()
    assert hanging.ended.acquire(timeout=LONG)
    assert guard.run(lambda: "next", "default", LONG) == "next"


def test_opens_after_three_failures_in_a_row_and_tries_once_after_the_cool_down(clock):
    guard, calls = DeadlineExecutor("test", LONG), []

    def operation(answer):
        calls.append(clock.now)
        return "answer" if answer else failing()

    for answer in (False, False, True, False, False, False):
        guard.run(lambda answer=answer: operation(answer), "default")
    assert len(calls) == 6
    clock.now += 4.9
    assert guard.run(lambda: operation(True), "default") == "default"
    assert len(calls) == 6
    clock.now += 0.2
    assert guard.run(lambda: operation(False), "default") == "default"
    assert len(calls) == 7
    assert guard.run(lambda: operation(True), "default") == "default"
    assert len(calls) == 7, "a failed trial opens it for another cool-down"
    clock.now += 5.1
    assert [guard.run(lambda: operation(True), "default") for _ in range(3)] == ["answer"] * 3


def test_hanging_threads_are_bounded_and_then_everything_is_refused(hanging, monkeypatch):
    monkeypatch.setattr(remote, "FAILURES", 10**6)
    monkeypatch.setattr(remote, "THREADS", 5)
    guard = DeadlineExecutor("bounded", SHORT)
    assert [guard.run(hanging, "default") for _ in range(20)] == ["default"] * 20
    assert len(threads_of("bounded")) == 5
    hanging.go_on.set()
    for _ in range(5):
        assert hanging.ended.acquire(timeout=LONG)
    while guard.run(lambda: "alive", "", LONG) != "alive":
        pass
    guard.close()
    assert guard.run(lambda: "closed", "refused") == "refused"


def test_an_operation_that_never_started_is_not_run_later(monkeypatch, hanging):
    monkeypatch.setattr(remote, "THREADS", 1)
    guard = DeadlineExecutor("test", LONG)
    ran: list[str] = []
    first = threading.Thread(target=guard.run, args=(hanging, ""))
    first.start()
    assert hanging.inside.acquire(timeout=LONG)
    assert guard.run(lambda: ran.append("queued") or "done", "default", SHORT) == "default"
    hanging.go_on.set()
    first.join()
    assert guard.run(lambda: "next", "default") == "next"
    assert ran == []
