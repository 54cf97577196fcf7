"""Work behind the answers when something goes wrong: jobs that fail or hang, threads that do not come."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from ragcachekit import threads as threads_module
from ragcachekit.background import BackgroundWorker

LONG = 60.0


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Until it is undone, no thread can be started."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield patch


def test_a_job_for_which_no_thread_starts_is_dropped_and_the_next_is_done(
    no_thread: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []
    worker = BackgroundWorker()
    jobs = worker.queue(done.append, 4)
    with caplog.at_level(logging.WARNING):
        assert not jobs.submit(1)
    assert "can't start new thread" in caplog.text
    assert jobs.waiting == 0
    assert worker.flush(LONG)
    no_thread.undo()
    assert jobs.submit(2)
    assert worker.flush(LONG)
    assert done == [2]
    worker.close()


def test_close_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads_module, "END_SECONDS", 0.05)
    go_on, inside = threading.Event(), threading.Event()

    def hang(job: int) -> None:
        inside.set()
        go_on.wait(LONG)

    worker = BackgroundWorker()
    jobs = worker.queue(hang, 4)
    assert jobs.submit(1)
    assert jobs.submit(2)
    assert inside.wait(LONG)
    with caplog.at_level(logging.WARNING):
        worker.close()
    assert "ragcachekit-background" in caplog.text
    assert not go_on.is_set()
    assert jobs.waiting == 0
    assert not jobs.submit(3)
    go_on.set()
    assert worker.flush(LONG)
