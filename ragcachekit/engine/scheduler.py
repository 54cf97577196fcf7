"""The scheduler of one engine: requests wait for their turn, then are decoded together.

The order is cache-aware (RAGCache section 5.2), and fair between namespaces.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from threading import TIMEOUT_MAX, get_ident

from ragcachekit.cancellation import ActiveRequests, CancelScope
from ragcachekit.config import QueueConfig
from ragcachekit.engine.request import Request
from ragcachekit.engine.runner import Runner
from ragcachekit.errors import Cancelled, Closed, DeadlineExceeded, EngineError, QueueFull
from ragcachekit.reports import Answer, QueueStats
from ragcachekit.threads import Condition, DaemonPool, Job
from ragcachekit.types import SECONDS_OR_NONE, check_number

log = logging.getLogger(__name__)

PREFETCHED = 4
"""Waiting requests whose entries in slow tiers are loaded before their turn (Cache-Craft section 3.4)."""

EVERY = 0.05
"""Seconds between two looks whether a request that waits for room was cancelled, or is late."""


class Scheduler:
    """The waiting and running requests of an engine, and the thread that answers them.

    Between two decoding steps it begins at most one request. In a forked child, which has no such thread,
    calls raise Closed.
    """

    def __init__(self, config: QueueConfig, runner: Runner, active: ActiveRequests) -> None:
        self._config, self.runner, self._active = config, runner, active
        self._order = CacheAwareOrder(config.window, lambda request: request.estimator.rows())
        self._pool = DaemonPool("ragcachekit-queue")
        self._changed = Condition()  # guards the order and everything below
        self._counts = Counter[str]()
        self._driving = self._closed = False
        self._thread: int | None = None  # that answers
        self._turns: list[Request] = []  # that the thread is beginning or answering

    @property
    def waiting(self) -> int:
        return len(self._order)

    @property
    def running(self) -> int:
        return len(self.runner.runs)

    def has_room(self) -> bool:
        return self.waiting < self._config.max_waiting

    def stats(self) -> QueueStats:
        """What became of the requests since the engine was made."""
        with self._changed:
            steps = self.runner.steps
            return QueueStats(
                **self._counts,
                waiting=self.waiting,
                running=self.running,
                steps=steps,
                mean_batch=self.runner.decoded / steps if steps else 0.0,
                most_overtaken=self._order.most_overtaken,
            )

    def refuse_own_thread(self) -> None:
        """RuntimeError in the thread that answers requests: what it waited for would never come."""
        self._changed.check_process()
        if self._thread != get_ident():
            return
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
                self._end(request, Cancelled())
                return
            self.refuse_own_thread()
            self._changed.wait_for(lambda: self._closed or self.has_room(), min(left, EVERY))

    def cancel(self, request: Request) -> None:
        """End a request that waits; one that runs ends itself."""
        with suppress(Closed):  # in a forked child
            if self._discard([request]):
                self._end(request, Cancelled())

    def close(self) -> None:
        """End waiting requests with Closed; running ones are finished. Idempotent."""
        with self._changed:
            self._closed = True
            if not self._driving:
                self._pool.close(0.0)
        self._end_waiting()

    def _add(self, request: Request) -> bool:
        with self._changed:
            if self._closed or self._pool.closed.is_set():
                raise Closed("this RagCache is closed; make a new one, or close it after its last use")
            if not self.has_room():
                return False
            self._order.add(request, request.share)
            if not self._driving and not self._pool.submit(Job(self._drive)):
                self._order.discard(request, request.share)
                raise RuntimeError("can't start new thread")
            self._driving = True
            self._counts["submitted"] += 1
            return True

    def _discard(self, requests: list[Request]) -> list[Request]:
        """Take requests out of the queue; returns those that waited."""
        self._changed.check_process()
        with self._changed:
            found = [request for request in requests if self._order.discard(request, request.share)]
            self._changed.notify_all()
            return found

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
                waiting = self._discard(list(self._order))
                ended = dict.fromkeys([*waiting, *self.runner.clear(), *self._turns])
                self._turns, self._driving = [], False
            self._fail([request for request in ended if not request.done()], error, "the engine's thread")
        finally:
            self._thread = None

    def _turn(self) -> bool:
        """Begin a request, decode a token for each; False, and the thread is over, if there is none."""
        self._sweep()
        self._turns = []
        if (request := self._next()) is not None:
            self._begin(request)
        try:
            self._turns = self.runner.step()
            for ended in self._turns:
                self._finish(ended)
        except Exception as error:
            log.exception("decoding a batch failed")
            self._fail(self.runner.clear(), error, "decoding the batch")
        with self._changed:
            self._driving, self._turns = bool(self.waiting or self.running), []
            self._changed.notify_all()
            return self._driving

    def _next(self) -> Request | None:
        with self._changed:
            best = self._order.best(self.runner.is_ready)
            if best is not None and self.runner.has_room(best):
                self._order.take(best, best.share)
                self._turns = [best]
                best.state = "running"
                self._changed.notify_all()
            else:
                best = None
            ahead = self._order.next_ones(PREFETCHED)
        for request in ahead:
            self.runner.prefetch(request)
        return best

    def _begin(self, request: Request) -> None:
        with self._changed:
            prompts = [waiting.prompt for waiting in self._order]
        wanted = {want.to_encode.key for prompt in prompts for want in prompt.wanted}
        try:
            if self.runner.begin(request, self._pool.closed, wanted):
                self._finish(request)
        except BaseException as error:  # also SystemExit of a streamer: the others go on
            self.runner.drop(request)
            self._end(request, error)

    def _finish(self, request: Request) -> None:
        try:
            with request.scope, CancelScope(self._pool.closed):
                answer = self.runner.answer(request)
        except BaseException as error:
            self._end(request, error)
        else:
            cancelled = answer.report.finish_reason == "cancelled"
            if cancelled and request.is_late:
                self._end(request, Cancelled())
            else:
                self._resolve(request, "cancelled" if cancelled else "done", answer)

    def _end(self, request: Request, error: BaseException) -> None:
        """End a request without the answer that it asked for."""
        if isinstance(error, Cancelled) and request.is_late:
            waited = time.perf_counter() - request.submitted_at
            late = f"not answered within its deadline: {request.state} after {waited:.3g} s"
            self._resolve(request, "expired", error=DeadlineExceeded(late))
        elif isinstance(error, Cancelled):
            self._resolve(request, "cancelled", self.runner.empty_answer(request))
        else:
            self._resolve(request, "failed", error=error)

    def _sweep(self) -> None:
        """End what was cancelled or has passed its deadline."""
        over = self._pool.closed.is_set()
        if over:
            self._end_waiting()
        with self._changed:
            ended = self._discard([r for r in self._order if r.cancel_requested or r.is_late])
        for request in list(self.runner.runs):
            if over or request.cancel_requested:
                request.ended.set()  # which the batch looks at
            elif request.is_late:
                self.runner.drop(request)
                ended.append(request)
        for request in ended:
            self._end(request, Cancelled())

    def _end_waiting(self) -> None:
        with self._changed:
            waiting = self._discard(list(self._order))
        for request in waiting:
            self._resolve(request, "failed", error=Closed("closed before this request's turn"))

    def _fail(self, requests: list[Request], error: BaseException, what: str) -> None:
        for request in requests:
            failed = EngineError(f"{what} failed: {error!r}; submit the request again")
            failed.__cause__ = error
            self._resolve(request, "failed", error=failed)

    def _resolve(
        self, request: Request, outcome: str, answer: Answer | None = None, error: BaseException | None = None
    ) -> None:
        with self._changed:
            self._counts[outcome] += 1
        try:  # before the result is there, so that whoever reads metrics after an answer finds it counted
            if (observed := request.observed) is not None:
                observed.end(None if answer is None else answer.report, error)
        finally:
            request.resolve(answer, error)


# -- the order of waiting requests ----------------------------------------------------------------


class CacheAwareOrder:
    """Waiting requests in the order of their turns. Not thread safe.

    Namespaces get equal shares of computed tokens, by start-time fair queueing: the one with the lowest start
    tag is next, and a new one starts at the present virtual time. Within a namespace the request with the
    most cached tokens per computed token is next, among its first ``window + 1``. None is overtaken more than
    ``window`` times by later ones of its namespace; with 0 the order is that of arrival.

    ``estimate`` returns cached and computed tokens, at least 1. ``most_overtaken`` is the highest count.
    """

    def __init__(self, window: int, estimate: Callable[[Request], tuple[int, int]]) -> None:
        self._window, self._estimate = window, estimate
        self._lines: dict[str, list[Request]] = {}
        self._starts: dict[str, float] = {}
        self._now = 0.0  # virtual time: the start tag of the last namespace served
        self._count = 0
        self.most_overtaken = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._lines.values())

    def add(self, request: Request, namespace: str) -> None:
        """Append a request to its namespace's line."""
        if namespace not in self._lines:
            self._lines[namespace] = []
            self._starts[namespace] = max(self._starts.get(namespace, 0.0), self._now)
        self._lines[namespace].append(request)
        self._count += 1

    def best(self, ready: Callable[[Request], bool] = lambda _: True) -> Request | None:
        """The request whose turn it is, which stays; None if there is none.

        Requests that are not ``ready`` come after the others, as long as they may be overtaken.
        """
        line = self._next_line()
        if not line:
            return None
        if self._count == 1 or line[0].overtaken >= self._window:
            return line[0]
        ranked = sorted(line[: self._window + 1], key=self._cost)
        return next(filter(ready, ranked), ranked[0])

    def next_ones(self, count: int) -> list[Request]:
        """The first ``count`` requests of the namespace that is next, in the order of their arrival."""
        return self._next_line()[:count]

    def take(self, request: Request, namespace: str) -> None:
        """Remove a request whose turn it is: earlier ones were overtaken, its namespace had its tokens."""
        line = self._lines[namespace]
        for earlier in line[: line.index(request)]:
            earlier.overtaken += 1
            self.most_overtaken = max(self.most_overtaken, earlier.overtaken)
        self._now = max(self._now, self._starts[namespace])
        if self._count > 1:  # after the last one nobody has had too much
            self._starts[namespace] += self._estimate(request)[1]
        self.discard(request, namespace)

    def discard(self, request: Request, namespace: str) -> bool:
        """Remove a request that has had no turn; False if it does not wait."""
        line = self._lines.get(namespace, [])
        left = [other for other in line if other is not request]
        if len(left) == len(line):
            return False
        self._lines[namespace] = left
        self._count -= 1
        if not left:
            del self._lines[namespace]
        if not self._lines:  # nobody waits: nobody has had too much
            self._starts, self._now = {}, 0.0
        elif len(self._starts) > 2 * len(self._lines) + 64:
            # Where a namespace that is idle would start now anyway, its tag carries no information.
            kept = self._starts.items()
            self._starts = {name: at for name, at in kept if name in self._lines or at > self._now}
        return True

    def _next_line(self) -> list[Request]:
        name = min(self._lines, key=self._starts.__getitem__, default=None)
        return [] if name is None else self._lines[name]

    def _cost(self, request: Request) -> float:
        cached, computed = self._estimate(request)
        return -cached / computed
