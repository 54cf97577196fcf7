"""Model work that ends or gives way between two layers: cancelled requests, work beside requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from math import inf
from threading import Event, Lock, Thread
from typing import Any, ParamSpec, Self, TypeVar

from ragcachekit.errors import Cancelled

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CancelScope:
    """A ``with`` block whose model work another thread can end.

    The block includes threads that copy its context, such as those of ``asyncio.to_thread`` and LangChain. A
    cancelled forward ends before its next layer or after its token, and its call raises
    :class:`~ragcachekit.errors.Cancelled`. Nothing of an unfinished forward is stored. Scopes nest: an inner
    one ends with those around it.

    Parameters
    ----------
    event : threading.Event, optional
        Cancels the scope when set, as :meth:`cancel` does.
    pause : callable, optional
        Called before every layer inside, of which it may delay the next one.
    deadline : float
        Cancels the scope at this time, in seconds of :func:`time.monotonic`.

    Examples
    --------
    >>> with CancelScope() as scope:  # doctest: +SKIP
    ...     button.on_click(scope.cancel)
    ...     rag.encode(texts)
    """

    def __init__(
        self, event: Event | None = None, *, pause: Callable[[], object] | None = None, deadline: float = inf
    ) -> None:
        self.between_layers = True  # False: the generate loop ends after a token, and keeps its tokens
        self._event, self._deadline = event, deadline
        self._cancelled = False  # not an Event: a signal handler may run while its lock is held
        self._outer = current_scope()
        inherited = self._outer.pause if self._outer is not None else None
        self.pause: Callable[[], object] | None = pause or inherited

    @property
    def requested(self) -> bool:
        """Whether this scope or one around it is cancelled."""
        if self._cancelled or (self._event is not None and self._event.is_set()):
            return True
        if self._deadline < time.monotonic():
            return True
        return self._outer is not None and self._outer.requested

    def cancel(self) -> None:
        """End the model work inside. Any thread may call it, and more than once."""
        self._cancelled = True

    def __enter__(self) -> Self:
        _ENTERED.set((self, *_ENTERED.get()))
        return self

    def __exit__(self, *_: object) -> None:
        _ENTERED.set(_ENTERED.get()[1:])

    def run(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``work`` inside the scope, in a worker thread; KeyboardInterrupt first cancels the scope.

        Without that the caller would wait for threads that ``work`` joins.
        """
        future = Future[_T]()

        def inside(future: Future[_T]) -> None:
            try:
                with self:
                    future.set_result(work(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        # Not an executor: after an interrupted submit it may not join its thread.
        thread = Thread(target=copy_context().run, args=(inside, future), name="ragcachekit-scope")
        try:
            thread.start()
            return future.result()
        except BaseException:
            self.cancel()
            raise
        finally:
            if thread.ident is not None:
                thread.join()
            del future  # an exception's traceback holds this frame


# The innermost first. Per thread and task, so that requests on the same model have separate scopes.
_ENTERED: ContextVar[tuple[CancelScope, ...]] = ContextVar("ragcachekit_cancel_scopes", default=())


def current_scope() -> CancelScope | None:
    """The innermost scope around the caller."""
    return next(iter(_ENTERED.get()), None)


def raise_if_cancelled() -> None:
    """Raise :class:`~ragcachekit.errors.Cancelled` in a cancelled scope; run in every layer."""
    scope = current_scope()
    if scope is None:
        return
    if scope.pause is not None:
        scope.pause()
    if scope.between_layers and scope.requested:
        raise Cancelled("the model work was cancelled; nothing of the forward that ran was kept")


# -- work beside requests ---------------------------------------------------------------------------

_EVERY = 0.02  # seconds between two looks

SHARE = 0.1
"""Part of the time that background work gets while requests run: not none, under a load that never ends."""


class ActiveRequests:
    """A ``with`` block around every request counts it. Thread safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.running = 0

    def __enter__(self) -> None:
        with self._lock:
            self.running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.running -= 1

    def wait_for_none(self, closed: Event) -> None:
        """Wait until no request runs; Cancelled once ``closed`` is set, or in a cancelled scope."""
        raise_if_cancelled()
        while self.running:
            if closed.wait(_EVERY):
                raise Cancelled("closed while waiting for requests")


class Backoff:
    """Slows one background job's model work down while requests run, to ``share`` of the time.

    It competes for the processor with the first token that somebody waits for. Called before every layer.
    ``active`` has the number of requests in ``running``.
    """

    def __init__(self, active: Any, closed: Event, share: float = SHARE) -> None:
        self._active, self._closed, self._share = active, closed, share
        self._since = time.monotonic()

    def __call__(self) -> None:
        """Wait until no request runs, a multiple of the time since the last call at most, or ``closed``."""
        now = time.monotonic()
        end = now + (now - self._since) * (1 / self._share - 1)
        while self._active.running and (left := end - time.monotonic()) > 0:
            if self._closed.wait(min(_EVERY, left)):
                break
        self._since = time.monotonic()
