"""The pool of daemon threads: order, limits, jobs that hang, the end."""

import gc
import threading
import weakref

import pytest

from ragcachekit import threads
from ragcachekit.threads import DaemonPool, Job

LONG = 60.0


@pytest.fixture
def pools():
    made = []

    def pool(**options):
        made.append(DaemonPool("test", **options))
        return made[-1]

    yield pool
    for one in made:
        one.close(0.0)


class Hanging(Job):
    """A job that hangs until :attr:`gate` is set."""

    def __init__(self):
        self.inside, self.gate = threading.Event(), threading.Event()
        super().__init__(self.hang)

    def hang(self):
        self.inside.set()
        assert self.gate.wait(LONG)
        return "late"


def hangs(pool):
    job = Hanging()
    assert pool.submit(job)
    assert job.inside.wait(LONG)
    return job


def test_no_more_threads_than_asked_for_and_no_more_jobs_than_may_wait(pools):
    pool = pools(threads=2)
    busy = [hangs(pool), hangs(pool)]
    assert pool.submit(Job(lambda: None), max_waiting=1)
    assert not pool.submit(Job(lambda: None), max_waiting=1)
    assert pool.waiting == 1
    for job in busy:
        job.gate.set()
    assert pool.flush(LONG)


def test_a_job_that_hangs_keeps_its_thread(pools):
    pool = pools(threads=1)
    first = hangs(pool)
    assert not pool.wait(first, 0.0)
    assert pool.give_up(first)
    assert pool.stuck == 1
    assert not pool.submit(Job(lambda: None)), "no thread is left"
    first.gate.set()
    assert pool.wait(first, LONG)
    assert (first.result, pool.stuck) == ("late", 0)
    after = Job(lambda: "after")
    assert pool.submit(after)
    assert pool.wait(after, LONG)


def test_idle_threads_end_and_hold_nothing(pools, monkeypatch):
    monkeypatch.setattr(threads, "IDLE_SECONDS", 0.01)
    pool = pools()

    class Owner:
        def work(self):
            seen.append(threading.current_thread())

    seen, owner = [], Owner()
    assert pool.submit(Job(owner.work))
    assert pool.flush(LONG)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    seen[0].join(LONG)
    assert not seen[0].is_alive()


def test_close_waits_for_the_job_in_work_and_drops_the_rest(pools):
    pool, ran = pools(), []
    job = Job(lambda: (pool.closed.wait(LONG), ran.append("in work")))
    dropped = Job(lambda: ran.append("dropped"))
    assert pool.submit(job)
    assert pool.submit(dropped)
    while not job.begun:
        pass
    pool.close()
    assert ran == ["in work"]
    assert not pool.wait(dropped, LONG), "at once: it will never be done"
    assert not pool.submit(Job(lambda: None))


PROGRAM = """
import sys, threading, time
from ragcachekit import threads
from ragcachekit.threads import DaemonPool, Job
threads.END_SECONDS = float(sys.argv[1])
pool, begun = DaemonPool("test"), threading.Event()
def work():
    begun.set()
    pool.closed.wait(60)
    time.sleep(float(sys.argv[2]))
    print("ended", flush=True)
pool.submit(Job(work))
begun.wait(60)
"""


@pytest.mark.parametrize(("waiting", "takes", "said"), [(60, 0.3, "ended\n"), (0.05, 60, "")])
def test_the_interpreter_waits_for_jobs_in_work_but_not_for_ever(said_by, waiting, takes, said):
    assert said_by(PROGRAM, waiting, takes) == said
