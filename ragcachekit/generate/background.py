"""Jobs behind the answers: one at a time, in a thread that comes when needed and goes when idle."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ragcachekit.errors import Cancelled
from ragcachekit.model.cancellation import CancelScope
from ragcachekit.store.process import PerProcess

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""How long the thread waits for more before it ends."""

END_SECONDS = 10.0
"""How long the end (also that of the process) waits for the job in work."""

Job = TypeVar("Job")


@dataclass(eq=False)
class _State(Generic[Job]):
    """What the worker and the finalizer share; it outlives neither."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    jobs: deque[Job] = field(default_factory=deque)
    busy: bool = False
    closed: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Background(Generic[Job]):
    """A bounded queue and its thread.

    Parameters
    ----------
    work : callable
        Does one job; what it raises is logged.
    most : int
        Jobs that may wait.
    name : str
        Of the thread.
    """

    def __init__(self, work: Callable[[Job], object], most: int, name: str) -> None:
        self._work = work
        self._most = most
        self._name = name
        self._states = PerProcess(_State[Job])
        # At exit too: an interpreter that goes while a thread is inside the model may crash.
        self._end = weakref.finalize(self, _end, self._states)

    @property
    def waiting(self) -> int:
        """Jobs in the queue, without the one in work."""
        return len(self._states.get().jobs)

    def submit(self, job: Job) -> bool:
        """Queue a job; False if there is no room or no thread for it, or after :meth:`close`."""
        state = self._states.get()
        with state.condition:
            if state.closed.is_set() or len(state.jobs) >= self._most:
                return False
            if state.thread is None or not state.thread.is_alive():  # a job may have ended it
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    log.warning("%s: no thread to be had, a job is dropped: %s", self._name, error)
                    return False
                state.thread = thread
            state.jobs.append(job)
            state.condition.notify_all()
        return True

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits or is in work; False if ``timeout`` seconds did not suffice."""
        state = self._states.get()
        with state.condition:
            return state.condition.wait_for(lambda: not state.jobs and not state.busy, timeout)

    def close(self) -> None:
        """End the job in work, drop the rest, end the thread.

        A forward of the job ends before its next layer; anything else is finished. A job that takes longer
        than :data:`END_SECONDS` is left to itself.
        """
        self._end()

    def _run(self) -> None:
        state = self._states.get()
        while True:
            with state.condition:
                state.condition.wait_for(lambda: state.jobs or state.closed.is_set(), IDLE_SECONDS)
                if not state.jobs:
                    # Idle: let go, so that whoever was dropped without close can be freed.
                    state.thread = None
                    return
                job, state.busy = state.jobs.popleft(), True
            try:
                with CancelScope(state.closed):
                    attempt(self._work, job)
            finally:
                del job  # a cache, perhaps: not while waiting for more
                with state.condition:
                    state.busy = False
                    state.condition.notify_all()


def attempt(work: Callable[[Job], object], job: Job) -> None:
    """Do a job; what it raises is logged. The answer that it comes behind is there already.

    A job that was cancelled has not failed: what it would have left is computed again when it is needed.
    """
    try:
        work(job)
    except Cancelled:
        pass
    except Exception:
        log.warning("a job behind an answer failed", exc_info=True)


def flush_all(flushes: Iterable[Callable[[float | None], bool]], timeout: float | None) -> bool:
    """Flush one after the other, all within ``timeout`` seconds; False if these did not suffice for one."""
    end = None if timeout is None else time.monotonic() + timeout
    done = [flush(None if end is None else max(0.0, end - time.monotonic())) for flush in flushes]
    return all(done)


def ended(thread: threading.Thread) -> None:
    """Wait for a thread that was told to end, though not for ever."""
    thread.join(END_SECONDS)
    if thread.is_alive():
        log.warning("%s has not ended within %g s; not waited for any longer", thread.name, END_SECONDS)


def _end(states: PerProcess[_State[Job]]) -> None:
    state = states.get()
    with state.condition:
        state.closed.set()
        state.jobs.clear()
        state.condition.notify_all()
        thread = state.thread
    if thread is not None and thread is not threading.current_thread():
        ended(thread)
