"""Cancellation of model work: forwards check the scope of their request between two layers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextvars import ContextVar, Token, copy_context
from functools import partial
from types import FrameType
from typing import Any, ParamSpec, Self, TypeVar

from ragcachekit.errors import Cancelled

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Per thread and task, so that requests on the same model have separate scopes.
_SCOPE: ContextVar[CancelScope | None] = ContextVar("ragcachekit_cancel_scope", default=None)


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
    on_interrupt : bool
        SIGINT cancels the scope before ``KeyboardInterrupt`` is raised, for executors that wait for their
        threads first (LangChain's ``RunnableParallel``). Main thread only.

    Examples
    --------
    >>> with CancelScope() as scope:  # doctest: +SKIP
    ...     button.on_click(scope.cancel)
    ...     rag.encode(texts)
    """

    def __init__(
        self,
        event: threading.Event | None = None,
        *,
        pause: Callable[[], object] | None = None,
        on_interrupt: bool = False,
    ) -> None:
        self.between_layers = True  # False: the generate loop ends after a token, and keeps its tokens
        self._event, self._on_interrupt = event, on_interrupt
        self._handler: Any = None
        self._cancelled = False  # not an Event: a signal handler may run while its lock is held
        self._outer = _SCOPE.get()
        inherited = self._outer.pause if self._outer is not None else None
        self.pause: Callable[[], object] | None = pause or inherited
        self._entered = threading.local()  # per thread: a stack of tokens and signal handlers

    @property
    def requested(self) -> bool:
        """Whether this scope or one around it is cancelled."""
        if self._cancelled or (self._event is not None and self._event.is_set()):
            return True
        return self._outer is not None and self._outer.requested

    @property
    def has_others(self) -> bool:
        """Whether an event, or a scope around this one, can cancel it too."""
        return self._event is not None or self._outer is not None

    def cancel(self) -> None:
        """End the model work inside. Any thread may call it, and more than once."""
        self._cancelled = True

    def __enter__(self) -> Self:
        handler = None
        if self._on_interrupt and (found := signal.getsignal(signal.SIGINT)) != self._interrupted:
            signal.signal(signal.SIGINT, self._interrupted)
            self._handler = handler = found
        self._stack().append((_SCOPE.set(self), handler))
        return self

    def __exit__(self, *_: object) -> None:
        token, handler = self._stack().pop()
        _SCOPE.reset(token)
        if handler is not None:  # None: not installed from Python, or not by this block
            signal.signal(signal.SIGINT, handler)

    def run(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``work`` inside the scope, in a worker thread; KeyboardInterrupt first cancels the scope.

        Without that the caller would wait for threads that ``work`` joins.
        """
        future = Future[_T]()
        # Not an executor: after an interrupted submit it may not join its thread.
        arguments = self._resolve, future, partial(work, *args, **kwargs)
        thread = threading.Thread(target=copy_context().run, args=arguments, name="ragcachekit-scope")
        try:
            thread.start()
            return future.result()
        except BaseException:
            self.cancel()
            raise
        finally:
            if thread.ident is not None:
                wait([future])
                thread.join()
            del future  # an exception's traceback holds this frame

    def iterate(self, items: Iterator[_T]) -> Iterator[_T]:
        """Yield the ``items`` of a generator, each from :meth:`run`; ending early cancels the scope."""
        end = object()
        try:
            while (item := self.run(next, items, end)) is not end:
                yield item  # type: ignore[misc]
        finally:
            self.cancel()
            if isinstance(items, Generator):
                items.close()

    def _stack(self) -> list[tuple[Token[CancelScope | None], Any]]:
        stack: list[tuple[Token[CancelScope | None], Any]]
        stack = self._entered.__dict__.setdefault("stack", [])
        return stack

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self.cancel()
        if callable(self._handler):
            self._handler(number, frame)

    def _resolve(self, future: Future[_T], work: Callable[[], _T]) -> None:
        try:
            with self:
                result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


def raise_if_cancelled() -> None:
    """Raise :class:`~ragcachekit.errors.Cancelled` in a cancelled scope; run in every layer."""
    scope = _SCOPE.get()
    if scope is None:
        return
    if scope.pause is not None:
        scope.pause()
    if scope.between_layers and scope.requested:
        raise Cancelled("the model work was cancelled; nothing of the forward that ran was kept")
