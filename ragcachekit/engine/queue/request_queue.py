"""The queue of one engine: requests wait for their turn, then are decoded together."""

from __future__ import annotations

import logging
import time
from collections import Counter
from math import inf
from threading import TIMEOUT_MAX, get_ident

from ragcachekit.cancellation import CancelScope
from ragcachekit.config import SECONDS_OR_NONE, QueueConfig, check_number
from ragcachekit.engine.active_requests import ActiveRequests
from ragcachekit.engine.queue.order import CacheAwareOrder
from ragcachekit.engine.queue.request import Request
from ragcachekit.engine.queue.runner import Runner
from ragcachekit.errors import Cancelled, Closed, DeadlineExceeded, EngineError, QueueFull
from ragcachekit.reports import Answer, QueueStats
from ragcachekit.threads import Condition, DaemonPool, Job, refuse_after_fork

log = logging.getLogger(__name__)

AHEAD = 4
"""Waiting requests whose entries in slow tiers are loaded before their turn (Cache-Craft section 3.4)."""


EVERY = 0.05
"""Seconds between two looks whether a request that waits for room was cancelled, or is late."""


class RequestQueue:
    """Requests of :meth:`ragcachekit.RagCache.submit`, and the thread that answers them.

    The thread starts with the first request and ends when none is left. Between two decoding steps of the
    batch it begins at most one request.
    """

    def __init__(self, config: QueueConfig, runner: Runner, active: ActiveRequests) -> None:
        self._config, self._runner, self._active = config, runner, active
        self._order = CacheAwareOrder[Request](config.window, lambda request: request.work.estimator.rows())
        self._pool = DaemonPool("ragcachekit-queue")
        self._changed = Condition()  # guards the order and everything below
        self._counts = Counter[str]()
        self._watched: dict[Request, None] = {}  # that wait and may end without their turn, or cancel()
        self._driving = self._closed = False
        self._thread: int | None = None  # that answers
        self._turns: list[Request] = []  # that the thread is beginning or answering
        refuse_after_fork(self)

    @property
    def waiting(self) -> int:
        """Requests whose turn has not come."""
        return len(self._order)

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return len(self._runner.requests)

    def has_room(self) -> bool:
        """Whether another request may wait."""
        return self.waiting < self._config.max_waiting

    def stats(self) -> QueueStats:
        """What became of the requests since the engine was made."""
        with self._changed:
            steps = self._runner.steps
            return QueueStats(
                **self._counts,
                waiting=self.waiting,
                running=self.running,
                steps=steps,
                mean_batch=self._runner.decoded / steps if steps else 0.0,
                most_overtaken=self._order.most_overtaken,
            )

    def refuse_own_thread(self) -> None:
        """RuntimeError in the thread that answers requests: what it waited for would never come."""
        if self._thread == get_ident():
            raise RuntimeError(
                "this is the thread that answers the engine's requests: waiting for one here never ends; "
                "use add_done_callback(), or wait in another thread"
            )

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no request waits or runs; False if ``timeout`` seconds did not suffice."""
        check_number("timeout", timeout, kinds=SECONDS_OR_NONE)
        self.refuse_own_thread()
        return self._changed.wait_for(lambda: not self._driving, timeout)

    def submit(self, request: Request, wait: bool | float = False) -> None:
        """Have a request wait for its turn; QueueFull without room, after ``wait`` seconds for it."""
        patience = wait if not isinstance(wait, bool) else TIMEOUT_MAX if wait else 0.0
        end = time.monotonic() + patience
        while not self._add(request):
            left = end - time.monotonic()
            if left <= 0:
                raise QueueFull(
                    f"{self._config.max_waiting} requests wait already; try again later, give wait= (True or "
                    "seconds), or make room with QueueConfig(max_waiting=...)"
                )
            if request.cancel_requested or request.is_late:
                with self._changed:
                    self._counts["submitted"] += 1
                self._ended_by(request, Cancelled())
                return
            self.refuse_own_thread()
            self._changed.wait_for(lambda: self._closed or self.has_room(), min(left, EVERY))

    def cancel(self, request: Request) -> None:
        """End a request that waits; one that runs ends itself."""
        with self._changed:
            mine = self._discard(request)
        if mine:
            self._ended_by(request, Cancelled())

    def close(self) -> None:
        """End waiting requests with Closed; running ones are finished. Idempotent."""
        with self._changed:
            self._closed = True
            if not self._driving:
                self._pool.close(0.0)
        self._end_waiting()

    # -- the lock is held --------------------------------------------------------------------------

    def _add(self, request: Request) -> bool:
        with self._changed:
            if self._closed or self._pool.closed.is_set():
                raise Closed("this RagCache is closed; make a new one, or close it after its last use")
            if not self.has_room():
                return False
            self._order.add(request, request.work.share)
            if request.work.deadline < inf or request.work.scope.has_others:
                self._watched[request] = None
            self._runner.note_waiting(request)
            if not self._driving and not self._pool.submit(Job(self._drive)):
                self._discard(request)
                raise RuntimeError("can't start new thread")
            self._driving = True
            self._counts["submitted"] += 1
            return True

    def _discard(self, request: Request) -> bool:
        found = self._order.discard(request, request.work.share)
        if found:
            self._left(request)
        return found

    def _left(self, request: Request) -> None:
        self._watched.pop(request, None)
        self._runner.note_left(request)
        self._changed.notify_all()

    # -- the engine's thread -----------------------------------------------------------------------

    def _drive(self) -> None:
        self._thread = get_ident()
        try:
            with self._active:
                while self._turn():
                    pass
        except BaseException as error:
            log.exception("the thread that answers requests failed")
            with self._changed:
                waiting = list(self._order)
                for request in waiting:
                    self._discard(request)
                ended = list(dict.fromkeys([*waiting, *self._runner.clear(), *self._turns]))
                self._turns, self._driving = [], False
                self._changed.notify_all()
            ended = [request for request in ended if not request.done()]
            self._fail(ended, error, "the engine's thread failed")
        finally:
            self._thread = None

    def _turn(self) -> bool:
        """Begin a request, decode a token for each; False, and the thread is over, if there is none."""
        self._sweep()
        self._turns = []
        if (request := self._next()) is not None:
            self._begin(request)
        try:
            self._turns = self._runner.step()
            for ended in self._turns:
                self._finish(ended)
        except Exception as error:
            log.exception("decoding a batch failed")
            self._fail(self._runner.clear(), error, "decoding the batch failed")
        with self._changed:
            self._driving, self._turns = bool(self.waiting or self.running), []
            self._changed.notify_all()
            return self._driving

    def _next(self) -> Request | None:
        with self._changed:
            best = self._order.best(self._runner.is_ready)
            if best is not None and self._runner.has_room(best):
                self._order.take(best, best.work.share)
                self._turns = [best]
                self._left(best)
                best.start()
            else:
                best = None
            ahead = self._order.next_ones(AHEAD)
        for request in ahead:
            self._runner.prefetch(request)
        return best

    def _begin(self, request: Request) -> None:
        try:
            if self._runner.begin(request, self._pool.closed):
                self._finish(request)
        except BaseException as error:  # also SystemExit of a streamer: the others go on
            self._runner.drop(request)
            self._ended_by(request, error)

    def _finish(self, request: Request) -> None:
        try:
            with request.work.scope, CancelScope(self._pool.closed):
                answer = self._runner.answer(request)
        except BaseException as error:
            self._ended_by(request, error)
        else:
            cancelled = answer.report.finish_reason == "cancelled"
            if cancelled and request.is_late:
                self._ended_by(request, Cancelled())
            else:
                self._resolve(request, "cancelled" if cancelled else "done", answer)

    def _ended_by(self, request: Request, error: BaseException) -> None:
        if isinstance(error, Cancelled) and request.is_late:
            waited = time.perf_counter() - request.work.submitted
            late = f"not answered within its deadline: {request.state} after {waited:.3g} s"
            self._resolve(request, "expired", error=DeadlineExceeded(late))
        elif isinstance(error, Cancelled):
            self._resolve(request, "cancelled", self._runner.nothing(request))
        else:
            self._resolve(request, "failed", error=error)

    def _sweep(self) -> None:
        """End what was cancelled or has passed its deadline."""
        now, over = time.monotonic(), self._pool.closed.is_set()
        if over:
            self._end_waiting()
        with self._changed:
            ended = [r for r in self._watched if r.work.deadline < now or r.cancel_requested]
            for request in ended:
                self._discard(request)
        for request in self._runner.requests:
            if over or request.cancel_requested:
                request.work.cancel.set()  # which the batch looks at
            elif request.work.deadline < now:
                self._runner.drop(request)
                ended.append(request)
        for request in ended:
            self._ended_by(request, Cancelled())

    def _end_waiting(self) -> None:
        with self._changed:
            waiting = list(self._order)
            for request in waiting:
                self._discard(request)
        for request in waiting:
            self._resolve(request, "failed", error=Closed("closed before this request's turn"))

    def _fail(self, requests: list[Request], error: BaseException, why: str) -> None:
        for request in requests:
            failed = EngineError(f"{why}: {error!r}; submit the request again")
            failed.__cause__ = error
            self._resolve(request, "failed", error=failed)

    def _resolve(
        self, request: Request, outcome: str, answer: Answer | None = None, error: BaseException | None = None
    ) -> None:
        with self._changed:
            self._counts[outcome] += 1
        try:  # before the result is there, so that whoever reads metrics after an answer finds it counted
            request.work.watch.end(None if answer is None else answer.report, error)
        finally:
            request.resolve(answer, error)
