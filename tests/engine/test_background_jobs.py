"""Work behind the answers when something goes wrong: jobs that fail or hang, threads that do not come."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from engine_kit import PROMPT, rag_for
from ragcachekit import threads as threads_module
from ragcachekit.background import BackgroundWorker
from ragcachekit.engine import after_answer as keep
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree

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


def test_a_job_that_ends_its_thread_does_not_end_the_queue() -> None:
    done: list[int] = []

    def work(job: int) -> None:
        if job == 1:
            threads.append(threading.current_thread())
            raise SystemExit
        done.append(job)

    threads: list[threading.Thread] = []
    worker = BackgroundWorker()
    jobs = worker.queue(work, 4)
    assert jobs.submit(1)
    assert worker.flush(LONG)
    threads[0].join(LONG)
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


def test_an_error_while_copying_into_the_tree_does_not_cost_the_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory for the copy")

    with rag_for("llama", policy="prefix", cold="now", tree=KnowledgeTree(host_bytes=1 << 26)) as rag:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(keep, "captured", fail)
            answer = rag.generate(PROMPT, max_new_tokens=2)
        assert "no memory for the copy" in caplog.text
        again = rag.generate(PROMPT, max_new_tokens=2)
    assert len(answer.token_ids) == 2
    assert again.token_ids == answer.token_ids
