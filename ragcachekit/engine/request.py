"""One prompt to answer: the call, the request that ``submit`` returns, and its stream."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from threading import Event
from traceback import clear_frames
from typing import Any, Literal, Self

from ragcachekit.cancellation import CancelScope, raise_if_cancelled
from ragcachekit.config import SECONDS_OR_NONE, check_number
from ragcachekit.generate.options import Detokenizer, RequestStreamer, TokenQueue
from ragcachekit.observers import ObservedRequest, attempt
from ragcachekit.plan.request import Estimator, PromptRequest
from ragcachekit.reports import Answer
from ragcachekit.reports.base import text_html
from ragcachekit.threads import Condition

State = Literal["waiting", "running", "done"]


@dataclass(frozen=True, eq=False)
class GenerateCall:
    """A tokenised prompt, and everything that was asked for.

    - ``options``: Complete ones of generate, with the ``streamer``; ``stop`` strings.
    - ``new_tokens``: Limit of the answer.
    - ``submitted_at``: In seconds of :func:`time.perf_counter`; ``deadline`` in those of
      :func:`time.monotonic`.
    - ``scope``: That of the calling thread; ``cancel`` ends this request alone.
    - ``observed``: Its observers.
    """

    prompt: PromptRequest
    options: Mapping[str, Any]
    stop: Sequence[str]
    estimator: Estimator
    new_tokens: int
    submitted_at: float
    deadline: float
    scope: CancelScope
    cancel: Event
    streamer: RequestStreamer | None
    observed: ObservedRequest

    @property
    def tokens(self) -> int:
        """Rows of the prompt and of the longest answer."""
        return self.estimator.tokens + self.new_tokens

    @property
    def share(self) -> str:
        """Whose share of the queue this takes: partitions ``NAME/...`` of a namespace have one together."""
        return self.prompt.namespace.partition("/")[0]


class Request:
    """One submitted prompt; :meth:`ragcachekit.RagCache.submit` returns it. Thread safe.

    Examples
    --------
    >>> requests = [rag.submit(prompt) for prompt in prompts]          # doctest: +SKIP
    >>> answers = [request.result() for request in requests]           # doctest: +SKIP
    """

    def __init__(
        self,
        call: GenerateCall,
        tokens: TokenQueue | None,
        detokenizer: Detokenizer,
        on_cancel: Callable[[Request], object],
        refuse_own_thread: Callable[[], object],
    ) -> None:
        self.call, self._on_cancel, self._refuse = call, on_cancel, refuse_own_thread
        self.prefetched, self.batch = False, 0
        self._tokens, self.detokenizer = tokens, detokenizer
        self._changed = Condition()
        self._state: State = "waiting"
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Request], object]] = []

    @property
    def state(self) -> State:
        """``waiting`` for its turn, ``running``, or ``done``: answered, cancelled or failed."""
        return self._state

    def result(self, timeout: float | None = None) -> Answer:
        """Wait for the answer; of a cancelled request, what was generated before.

        An interrupted wait cancels the request.

        Raises
        ------
        RuntimeError
            In the engine's own thread, as in a streamer or a callback, before it is done.
        TimeoutError
            After ``timeout`` seconds; the request goes on.
        DeadlineExceeded
            If it was not answered within its deadline.
        EngineError
            If the batch that it was decoded in failed.
        BaseException
            What its own streamer, processor or criterion raised, whatever that is.
        Closed
            If the engine was closed before its turn.
        Cancelled
            In a cancelled :class:`ragcachekit.CancelScope`.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"not answered within {timeout:g} s; it goes on: ask again, or cancel()")
        raise_if_cancelled()
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done; False after ``timeout`` seconds. Other errors as for :meth:`result`."""
        check_number("timeout", timeout, kinds=SECONDS_OR_NONE)
        self._refuse_own_thread(timeout)
        try:
            return self._changed.wait_for(self.done, timeout)
        except KeyboardInterrupt:
            self.cancel()
            raise

    def stream(self) -> Iterator[str]:
        """Yield the text as it is generated, in pieces; ending early cancels the request.

        A second iterator, or one beside a ``streamer`` that was given, yields the whole text at the end.
        """
        given, tokens, self._tokens = "", self._tokens, None
        try:
            self._refuse_own_thread()
            for ids in tokens or ():
                if piece := self.detokenizer.push(ids):
                    given += piece
                    yield piece
                    self._refuse_own_thread()
            if rest := self.result().text[len(given) :]:
                yield rest
        finally:
            if not self.done():
                self.cancel()

    def cancel(self) -> None:
        """End the request: at once where it waits, else before the next layer of its prefill, or token."""
        self.call.cancel.set()
        self._on_cancel(self)

    def done(self) -> bool:
        """Whether it was answered, cancelled or failed."""
        return self._state == "done"

    def cancelled(self) -> bool:
        """Whether it ended because it was cancelled."""
        return self._answer is not None and self._answer.report.finish_reason == "cancelled"

    def add_done_callback(self, callback: Callable[[Request], object]) -> None:
        """Call ``callback(request)`` once it is done: in the engine's thread, or now.

        There, waiting for another request is a RuntimeError. Its errors are logged.
        """
        with self._changed:
            if not self.done():
                self._callbacks.append(callback)
                return
        attempt(callback, self)

    # -- for the scheduler -------------------------------------------------------------------------

    def _refuse_own_thread(self, timeout: float | None = None) -> None:
        if not self.done() and timeout != 0:
            self._refuse()

    def start(self) -> None:
        """Note that its turn has come."""
        self._state = "running"

    @property
    def cancel_requested(self) -> bool:
        """Whether it, or the scope that it was submitted in, was cancelled."""
        return self.call.cancel.is_set() or self.call.scope.requested

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed, and nothing else has ended it."""
        return self.call.deadline < time.monotonic() and not self.cancel_requested

    def resolve(self, answer: Answer | None = None, error: BaseException | None = None) -> None:
        """End it with an answer or an error; called once, by the scheduler."""
        cause, cleared = error, set[int]()  # an error can be its own cause
        while cause is not None and id(cause) not in cleared:  # whose frames hold the KV of a whole batch
            clear_frames(cause.__traceback__)
            cleared.add(id(cause))
            cause = cause.__cause__ or cause.__context__
        with self._changed:
            self._answer, self._error, self._state = answer, error, "done"
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        if self.call.streamer is not None:
            attempt(self.call.streamer.end)
        for callback in callbacks:
            attempt(callback, self)


class AnswerStream:
    """An iterator over the pieces of a request's text; what :meth:`ragcachekit.RagCache.stream` returns.

    Closing it early (``close``, leaving a ``with`` block, dropping the iterator, or an interrupted wait)
    cancels generation before the next layer of the prefill, or after the current token.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._pieces = request, request.stream()
        # The engine holds the request and not this object: dropping it is how many end a stream.
        weakref.finalize(self, request.cancel).atexit = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        """The whole answer with its report; waits for the end of generation."""
        return self._request.result()

    def display(self) -> Answer:
        """Show the text in a notebook as it is generated; returns the answer. ImportError without IPython."""
        notebook: Any = import_module("IPython.display")
        shown, text = notebook.display(notebook.HTML(""), display_id=True), ""
        for piece in self:
            text += piece
            shown.update(notebook.HTML(text_html(text)))
        return self.answer

    def cancel(self) -> None:
        """Stop before the next layer of the prefill, or after the current token; generated text stays."""
        self._request.cancel()

    def close(self) -> None:
        """Cancel and wait."""
        self.cancel()
        self._request.wait()
