"""One prompt to answer: the call, the request that ``submit`` returns, its stream, and both from asyncio."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from threading import Event
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar

from ragcachekit.cancellation import CancelScope, raise_if_cancelled
from ragcachekit.errors import Cancelled, EngineError
from ragcachekit.observers import ObservedRequest
from ragcachekit.reports import Answer
from ragcachekit.threads import Condition, attempt
from ragcachekit.types import SECONDS_OR_NONE, check_deadline, check_number

if TYPE_CHECKING:  # importing this file, as astream does, should not import torch
    from ragcachekit.generate.options import Detokenizer, RequestStreamer, TokenQueue
    from ragcachekit.plan.link_plan import PromptRequest
    from ragcachekit.plan.planner import Estimator

_P = ParamSpec("_P")
_T = TypeVar("_T")
State = Literal["waiting", "running", "done"]


class Request:
    """One submitted prompt; :meth:`ragcachekit.RagCache.submit` returns it. Thread safe.

    Attributes
    ----------
    state : {"waiting", "running", "done"}
        Waiting for its turn, running, or answered, cancelled or failed.

    Examples
    --------
    >>> requests = [rag.submit(prompt) for prompt in prompts]          # doctest: +SKIP
    >>> answers = [request.result() for request in requests]           # doctest: +SKIP
    """

    # ``options`` are complete ones of generate, ``new_tokens`` is the limit of the answer. ``submitted_at``
    # is in seconds of time.perf_counter, ``deadline`` in those of time.monotonic. ``scope`` is that of the
    # calling thread; ``ended`` cancels this request alone. ``tokens`` has those for :meth:`stream`.
    def __init__(
        self,
        queue: Any,
        prompt: PromptRequest,
        options: Mapping[str, Any],
        stop: Sequence[str],
        *,
        estimator: Estimator,
        new_tokens: int,
        submitted_at: float,
        deadline: float,
        scope: CancelScope,
        observed: ObservedRequest | None,
        streamer: RequestStreamer | None,
        tokens: TokenQueue | None,
        detokenizer: Detokenizer,
    ) -> None:
        self.prompt, self.options, self.stop = prompt, options, stop
        self.estimator, self.new_tokens = estimator, new_tokens
        self.submitted_at, self.deadline, self.scope = submitted_at, deadline, scope
        self.observed, self.streamer, self.detokenizer = observed, streamer, detokenizer
        self.ended, self.prefetched = Event(), False
        self.overtaken = 0  # by later ones of its namespace
        self.state: State = "waiting"
        self._queue, self._tokens, self._changed = queue, tokens, Condition()
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Request], object]] = []

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
        if timeout is not None:
            check_number("timeout", timeout, kinds=SECONDS_OR_NONE)
        if self.done() or timeout == 0:
            return self.done()
        self._queue.refuse_own_thread()
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
            if not self.done():
                self._queue.refuse_own_thread()
            for ids in tokens or ():
                if piece := self.detokenizer.push(ids):
                    given += piece
                    yield piece
            if rest := self.result().text[len(given) :]:
                yield rest
        finally:
            if not self.done():
                self.cancel()

    def cancel(self) -> None:
        """End the request: at once where it waits, else before the next layer of its prefill, or token."""
        self.ended.set()
        self._queue.cancel(self)

    def done(self) -> bool:
        """Whether it was answered, cancelled or failed."""
        return self.state == "done"

    def cancelled(self) -> bool:
        """Whether it ended because it was cancelled."""
        return self._answer is not None and self._answer.report.finish_reason == "cancelled"

    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    def listen(self, read: Callable[[list[int] | None], object]) -> None:
        """Call ``read`` with the token ids of each step, those so far first, and with None at the end.

        Instead of :meth:`stream`; in the engine's thread.
        """
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            self.add_done_callback(lambda _: read(None))
        else:
            tokens.listen(read)

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

    @property
    def rows(self) -> int:
        """Rows of the prompt and of the longest answer."""
        return self.estimator.tokens + self.new_tokens

    @property
    def share(self) -> str:
        """Whose share of the queue this takes: partitions ``NAME/...`` of a namespace have one together."""
        return self.prompt.namespace.partition("/")[0]

    @property
    def cancel_requested(self) -> bool:
        """Whether it, or the scope that it was submitted in, was cancelled."""
        return self.ended.is_set() or self.scope.requested

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed, and nothing else has ended it."""
        return self.deadline < time.monotonic() and not self.cancel_requested

    def resolve(self, answer: Answer | None = None, error: BaseException | None = None) -> None:
        """End it with an answer or an error; called once, by the scheduler."""
        cause, cleared = error, set[int]()  # an error can be its own cause
        while cause is not None and id(cause) not in cleared:  # whose frames hold the KV of a whole batch
            clear_frames(cause.__traceback__)
            cleared.add(id(cause))
            cause = cause.__cause__ or cause.__context__
        with self._changed:
            self._answer, self._error, self.state = answer, error, "done"
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        if self.streamer is not None:
            attempt(self.streamer.end)
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

    def cancel(self) -> None:
        """Stop before the next layer of the prefill, or after the current token; generated text stays."""
        self._request.cancel()

    def close(self) -> None:
        """Cancel and wait."""
        self.cancel()
        self._request.wait()


# -- asyncio ---------------------------------------------------------------------------------------

_EVERY = 0.01  # seconds between two looks for room


class AsyncAnswerStream:
    """An answer as it is generated: an async iterator of text pieces, and an async context manager.

    The prompt is submitted at the first step, or when the context is entered. Leaving the context,
    :meth:`aclose` and dropping the stream cancel a generation that goes on, before its next layer or after
    its token; the context does it at once, whatever ends the loop. ``submit`` returns the request.

    Examples
    --------
    >>> async with astream(rag, "Where does Ada live?", max_new_tokens=32) as stream:  # doctest: +SKIP
    ...     async for piece in stream:
    ...         print(piece, end="")
    """

    def __init__(self, submit: Callable[[], Awaitable[Request]]) -> None:
        self._submit, self._given, self._generated = submit, "", 0
        self._ended, self._entering = False, asyncio.Lock()
        self._submitted: Request | None = None
        self._steps = asyncio.Queue[list[int] | None]()

    async def __aenter__(self) -> AsyncAnswerStream:
        async with self._entering:
            if self._submitted is None:
                loop, self._submitted = asyncio.get_running_loop(), await self._submit()
                self._submitted.listen(partial(_soon, loop, self._steps.put_nowait))
                weakref.finalize(self, _soon, loop, self._submitted.cancel).atexit = False
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the iteration, and cancel a generation that goes on."""
        self._ended = True
        if self._submitted is not None:
            self._submitted.cancel()

    def __aiter__(self) -> AsyncAnswerStream:
        return self

    async def __anext__(self) -> str:
        if self._submitted is None and not self._ended:
            await self.__aenter__()
        while not self._ended:
            ids = await self._steps.get()
            self._ended = ids is None
            self._generated += len(ids or ())
            if ids is not None:
                piece = self._request.detokenizer.push(ids)
            else:  # the text can end before the request does (cold="now" encodes): the answer has the rest
                piece = (await answered(self._request)).text[len(self._given) :]
            if piece:
                self._given += piece
                return piece
        raise StopAsyncIteration

    @property
    def _request(self) -> Request:
        if self._submitted is None:
            raise RuntimeError("nothing was asked yet: begin with `async for` or `async with`")
        return self._submitted

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self._request.estimator.tokens + self._generated

    @property
    def answer(self) -> Answer:
        """The whole answer with its report, once the iteration has ended."""
        return _answer(self._request)


def astream(rag: Any, prompt: Any, **options: Any) -> AsyncAnswerStream:
    """``rag.submit(prompt, **options)`` for ``async for``, with or without ``async with``.

    It waits for room in a full queue; with ``wait=False`` it raises QueueFull. ValueError for a ``streamer``.
    """
    if options.get("streamer") is not None:
        raise ValueError("astream reads the tokens itself; give streamer= to agenerate")
    from ragcachekit.generate.options import TokenQueue  # with torch, which importing this file leaves alone

    return AsyncAnswerStream(lambda: submitted(rag, prompt, {**options, "streamer": TokenQueue()}))


async def agenerate(rag: Any, prompt: Any, **options: Any) -> Answer:
    """``rag.submit(prompt, **options)`` and its answer, cancellable; a full queue as for :func:`astream`."""
    return await answered(await submitted(rag, prompt, options))


async def submitted(rag: Any, prompt: Any, options: Mapping[str, Any]) -> Request:
    """``rag.submit(prompt, **options)`` in a thread, after room in the queue as for :func:`astream`."""
    rag.queue.refuse_own_thread()
    options = {"wait": True, **options}
    check_deadline(options.get("deadline"))
    end = time.monotonic() + (inf if options.get("deadline") is None else options["deadline"])
    while options["wait"] is True and not rag.queue.has_room() and time.monotonic() < end:
        await asyncio.sleep(_EVERY)  # in no thread: there are few, and many may wait
    if end < inf:
        options["deadline"] = max(0.0, end - time.monotonic())
    return await to_thread(rag.submit, prompt, **options)


async def answered(request: Request) -> Answer:
    """The answer of a request, which is cancelled with the task."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    request.add_done_callback(lambda _: _soon(loop, done.set))
    try:
        await done.wait()
    except asyncio.CancelledError:
        request.cancel()
        raise
    return _answer(request)


def _answer(request: Request) -> Answer:
    """The answer of a request that has ended.

    EngineError for what its own code raised beyond Exception: CancelledError would look as if the task had
    been cancelled, SystemExit would end the loop.
    """
    try:
        return request.result(0)
    except (Cancelled, Exception):
        raise
    except BaseException as error:
        raise EngineError(f"the request's own streamer, processor or criterion raised {error!r}") from error


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    with suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(call, *arguments)


async def to_thread(work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call :func:`asyncio.to_thread`; the model work ends when the task is cancelled.

    >>> ids = await to_thread(rag.encode, texts)  # doctest: +SKIP
    """
    with CancelScope() as scope:
        try:
            return await asyncio.to_thread(work, *args, **kwargs)
        except asyncio.CancelledError:
            scope.cancel()
            raise
