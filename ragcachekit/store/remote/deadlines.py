"""Operations on a service that may hang: a deadline for each, a bound on hanging threads, a circuit breaker.

Daemon threads rather than ``concurrent.futures.ThreadPoolExecutor``: at exit that one joins all its threads,
and a thread that hangs in a dead file system never ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

from ragcachekit.store.remote.circuit_breaker import Breaker
from ragcachekit.store.remote.lookup_budget import lookup_budget
from ragcachekit.threads import Condition

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class DeadlineStats:
    """Counts of a guard since it was made.

    Attributes
    ----------
    calls : int
        Operations asked for.
    timeouts, errors : int
        How many of them took too long, or raised.
    refused : int
        How many were not tried: the breaker was open, every thread hung, or the plan had waited enough.
    opened : int
        Times that the breaker opened.
    stuck : int
        Threads that still hang in an operation whose caller has given up.
    is_open : bool
        Whether operations are refused at present.
    """

    calls: int
    timeouts: int
    errors: int
    refused: int
    opened: int
    stuck: int
    is_open: bool


@dataclass(eq=False)
class _Call:
    """One operation. ``begun`` and ``done`` are set by its thread, ``given_up`` by its caller."""

    operation: Callable[[], Any]
    begun: bool = False
    done: bool = False
    given_up: bool = False
    result: Any = None
    error: BaseException | None = None


class DeadlineExecutor:
    """Runs each operation in a thread of its own and waits for it until a deadline. Thread safe.

    Parameters
    ----------
    name : str
        Of the tier, for the log.
    deadline : float
        Seconds that :meth:`run` waits for an operation; > 0.
    failures, cooldown, clock
        As in :class:`~ragcachekit.store.remote.circuit_breaker.Breaker`.
    threads : int
        Operations that run, or hang, at the same time. Others wait within their deadline; when all hang,
        they are refused at once.
    """

    def __init__(
        self,
        name: str,
        deadline: float,
        *,
        failures: int = 3,
        cooldown: float = 5.0,
        threads: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not deadline > 0:
            raise ValueError(f"the deadline must be > 0 seconds, got {deadline}")
        self.deadline = deadline
        self._name, self._threads = name, threads
        self._breaker = Breaker(failures, cooldown, clock)
        self._changed = Condition()
        self._calls: set[_Call] = set()  # those that have a thread
        self._counts = {"calls": 0, "timeouts": 0, "errors": 0, "refused": 0}
        self._closed = False

    def run(self, operation: Callable[[], T], default: T, deadline: float | None = None) -> T:
        """What ``operation`` returns, or ``default`` if it raises, is late or is refused."""
        self._count("calls")
        if self._closed or not self._breaker.allow():
            self._count("refused")
            return default
        failure, result = "interrupted", default  # not a success unless it returns
        try:
            failure, result = self._outcome(operation, default, deadline or self.deadline)
        finally:
            if self._breaker.record(not failure):
                _log.warning("%s tier: not used for a while after too many failures: %s", self._name, failure)
        return result

    def look(self, operation: Callable[[], T], default: T) -> T:
        """As :meth:`run`, but refused if the plan that asks has waited enough for this service."""
        plan = lookup_budget()
        if plan is None:
            return self.run(operation, default)
        if not plan.lasts(self, self.deadline):
            self._count("calls")
            self._count("refused")
            return default
        with plan.spending(self):
            return self.run(operation, default)

    def stats(self) -> DeadlineStats:
        """Counts so far."""
        with self._changed:
            return DeadlineStats(
                **self._counts,
                opened=self._breaker.opened,
                stuck=sum(call.given_up for call in self._calls),
                is_open=self._breaker.is_open,
            )

    def close(self) -> None:
        """Refuse further operations."""
        self._closed = True

    def _count(self, event: str) -> None:
        with self._changed:
            self._counts[event] += 1

    def _outcome(self, operation: Callable[[], T], default: T, deadline: float) -> tuple[str, T]:
        """Why it failed (empty: it did not), and what to return."""
        call = _Call(operation)
        hopeless = self._wait_for(call, deadline)
        if hopeless:
            self._count("refused")
            return hopeless, default
        if call.given_up:
            self._count("timeouts")
            return f"no answer within {deadline:g} s", default
        if call.error is not None:
            self._count("errors")
            return f"{type(call.error).__name__}: {call.error}", default
        return "", call.result

    def _wait_for(self, call: _Call, deadline: float) -> str:
        """Run a call and wait until it is done or late; why it could not be run, if so."""
        end = time.monotonic() + deadline
        try:
            if self._changed.wait_for(lambda: self._admit(call), deadline):
                if call not in self._calls:
                    return "every thread hangs"
                name = f"ragcachekit-{self._name}"
                Thread(target=self._work, args=(call,), name=name, daemon=True).start()
                self._changed.wait_for(lambda: call.done, end - time.monotonic())
            return ""
        except RuntimeError as error:
            return f"no thread: {error}"
        finally:
            with self._changed:  # as its thread does: a call is either done or given up
                call.given_up = not call.done
                if not call.begun:
                    self._calls.discard(call)
                self._changed.notify_all()  # there may be a place for another one

    def _admit(self, call: _Call) -> bool:
        """Give a call a thread's place; False if it is worth waiting for one (not if all threads hang)."""
        if len(self._calls) < self._threads:
            self._calls.add(call)
            return True
        return all(other.given_up for other in self._calls)

    def _work(self, call: _Call) -> None:
        with self._changed:
            call.begun = True
            if call.given_up:
                return
        result, error = None, None
        try:
            result = call.operation()
        except BaseException as raised:
            error = raised
        with self._changed:
            call.result, call.error, call.done = result, error, True
            self._calls.discard(call)
            self._changed.notify_all()
