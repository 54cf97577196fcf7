"""A submitted prompt and its answer to come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from traceback import clear_frames
from typing import Literal

import torch

from ragcachekit.cancellation import CancelScope, raise_if_cancelled
from ragcachekit.config import SECONDS_OR_NONE, check_number
from ragcachekit.engine.request_path import Asked
from ragcachekit.generate.detokenizer import Detokenizer, OrderedPrompt, TokenQueue
from ragcachekit.observers import Watch, attempt
from ragcachekit.plan.estimate import Estimator
from ragcachekit.plan.request import PromptRequest
from ragcachekit.reports import Answer
from ragcachekit.threads import Condition, refuse_after_fork

State = Literal["waiting", "running", "done"]


class Late(Event):
    """Set once a deadline, in seconds of :func:`time.monotonic`, has passed."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def is_set(self) -> bool:
        return self._deadline < time.monotonic()


class TokenCounter(OrderedPrompt):
    """A streamer that is ended once, and knows whether tokens of the answer went through it."""

    streamed = ended = False

    def put(self, value: torch.Tensor) -> None:
        self.streamed = self.streamed or self._begun
        super().put(value)

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            super().end()


@dataclass(frozen=True, eq=False)
class Work:
    """What the queue knows of a request: the tokenised prompt, and what was asked for.

    ``new_tokens`` limits the answer. ``submitted`` is in seconds of :func:`time.perf_counter`, ``deadline``
    of :func:`time.monotonic`. ``scope`` is that of the submitting call.
    """

    prompt: PromptRequest
    asked: Asked
    estimator: Estimator
    new_tokens: int
    submitted: float
    deadline: float
    scope: CancelScope
    cancel: Event
    streamer: TokenCounter | None
    watch: Watch

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
        work: Work,
        tokens: TokenQueue | None,
        detokenizer: Detokenizer,
        on_cancel: Callable[[Request], object],
        refuse_own_thread: Callable[[], object],
    ) -> None:
        self.work, self._on_cancel, self._refuse = work, on_cancel, refuse_own_thread
        self.prefetched, self.batch = False, 0
        self._tokens, self.detokenizer = tokens, detokenizer
        self._changed = Condition()
        self._state: State = "waiting"
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Request], object]] = []
        refuse_after_fork(self)

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
        check_number("timeout", timeout, kinds=SECONDS_OR_NONE)
        self._refuse_own_thread(timeout)
        try:
            if not self._changed.wait_for(self.done, timeout):
                raise TimeoutError(f"not answered within {timeout:g} s; it goes on: ask again, or cancel()")
        except KeyboardInterrupt:
            self.cancel()
            raise
        raise_if_cancelled()
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

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
        self.work.cancel.set()
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

    # -- for the queue -----------------------------------------------------------------------------

    def _refuse_own_thread(self, timeout: float | None = None) -> None:
        if not self.done() and timeout != 0:
            self._refuse()

    def start(self) -> None:
        """Note that its turn has come."""
        self._state = "running"

    @property
    def cancel_requested(self) -> bool:
        """Whether it, or the scope that it was submitted in, was cancelled."""
        return self.work.cancel.is_set() or self.work.scope.requested

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed, and nothing else has ended it."""
        return self.work.deadline < time.monotonic() and not self.cancel_requested

    def resolve(self, answer: Answer | None = None, error: BaseException | None = None) -> None:
        """End it with an answer or an error; called once, by the queue."""
        cause, cleared = error, set[int]()  # an error can be its own cause
        while cause is not None and id(cause) not in cleared:  # whose frames hold the KV of a whole batch
            clear_frames(cause.__traceback__)
            cleared.add(id(cause))
            cause = cause.__cause__ or cause.__context__
        with self._changed:
            self._answer, self._error, self._state = answer, error, "done"
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        if self.work.streamer is not None:
            attempt(self.work.streamer.end)
        for callback in callbacks:
            attempt(callback, self)
