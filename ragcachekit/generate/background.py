"""Jobs behind the answers: one at a time, in a thread that comes when needed and goes when idle."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""How long the thread waits for more before it ends."""

Job = TypeVar("Job")


@dataclass(eq=False)
class _State(Generic[Job]):
    """What the worker and the finalizer share; it outlives neither."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    jobs: deque[Job] = field(default_factory=deque)
    busy: bool = False
    closed: bool = False
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
        self._state = _State[Job]()
        # At exit too: an interpreter that goes while a thread is inside the model may crash.
        self._end = weakref.finalize(self, _end, self._state)

    @property
    def waiting(self) -> int:
        """Jobs in the queue, without the one in work."""
        return len(self._state.jobs)

    def submit(self, job: Job) -> bool:
        """Queue a job; False if there is no room for it, or after :meth:`close`."""
        state = self._state
        with state.condition:
            if state.closed or len(state.jobs) >= self._most:
                return False
            state.jobs.append(job)
            state.condition.notify_all()
            if state.thread is None:
                state.thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                state.thread.start()
        return True

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits or is in work; False if ``timeout`` seconds did not suffice."""
        state = self._state
        with state.condition:
            return state.condition.wait_for(lambda: not state.jobs and not state.busy, timeout)

    def close(self) -> None:
        """Finish the job in work, drop the rest, end the thread."""
        self._end()

    def _run(self) -> None:
        state = self._state
        while True:
            with state.condition:
                state.condition.wait_for(lambda: state.jobs or state.closed, IDLE_SECONDS)
                if not state.jobs:
                    # Idle: let go, so that whoever was dropped without close can be freed.
                    state.thread = None
                    return
                job, state.busy = state.jobs.popleft(), True
            try:
                self._work(job)
            except Exception:
                log.warning("a job in the background failed", exc_info=True)
            finally:
                with state.condition:
                    state.busy = False
                    state.condition.notify_all()


def _end(state: _State[Job]) -> None:
    with state.condition:
        state.closed = True
        state.jobs.clear()
        state.condition.notify_all()
        thread = state.thread
    if thread is not None and thread is not threading.current_thread():
        thread.join()
