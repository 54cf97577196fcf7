"""Generation from asyncio; a cancelled task ends its request."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ragcachekit.cancellation import CancelScope
from ragcachekit.config import check_deadline
from ragcachekit.errors import Cancelled, EngineError
from ragcachekit.reports import Answer

if TYPE_CHECKING:
    from ragcachekit.engine.rag_cache import RagCache
    from ragcachekit.engine.request import Request

_P = ParamSpec("_P")
_T = TypeVar("_T")
_EVERY = 0.01  # seconds between two looks for room


class _Tokens:
    """A streamer that hands the new token ids of each step to an event loop; None at the end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._prompt_seen = False
        self.queue = asyncio.Queue[list[int] | None]()

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            _soon(self._loop, self.queue.put_nowait, value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        _soon(self._loop, self.queue.put_nowait, None)


class AsyncAnswerStream:
    """An answer as it is generated: an async iterator of text pieces, and an async context manager.

    The prompt is submitted at the first step, or when the context is entered. Leaving the context,
    :meth:`aclose` and dropping the stream cancel a generation that goes on, before its next layer or after
    its token; the context does it at once, whatever ends the loop. ``submit`` takes a streamer and returns
    the request.

    Examples
    --------
    >>> async with astream(rag, "Where does Ada live?", max_new_tokens=32) as stream:  # doctest: +SKIP
    ...     async for piece in stream:
    ...         print(piece, end="")
    """

    def __init__(self, submit: Callable[[_Tokens], Awaitable[Request]]) -> None:
        self._submit, self._given, self._generated = submit, "", 0
        self._ended, self._entering = False, asyncio.Lock()
        self._submitted: Request | None = None

    async def __aenter__(self) -> AsyncAnswerStream:
        async with self._entering:
            if self._submitted is None:
                self._tokens = _Tokens()
                self._submitted = request = await self._submit(self._tokens)
                weakref.finalize(self, _soon, asyncio.get_running_loop(), request.cancel).atexit = False
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
            ids = await self._tokens.queue.get()
            self._ended = ids is None
            self._generated += len(ids or ())
            # The text can end before the request does (cold="now" encodes): the answer has what is left.
            piece = self._request.detokenizer.push(ids) if ids is not None else await self._rest()
            if piece:
                self._given += piece
                return piece
        raise StopAsyncIteration

    async def _rest(self) -> str:
        return (await answered(self._request)).text[len(self._given) :]

    @property
    def _request(self) -> Request:
        if self._submitted is None:
            raise RuntimeError("nothing was asked yet: begin with `async for` or `async with`")
        return self._submitted

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self._request.call.estimator.tokens + self._generated

    @property
    def answer(self) -> Answer:
        """The whole answer with its report, once the iteration has ended."""
        return _answer(self._request)


def astream(rag: RagCache, prompt: Any, **options: Any) -> AsyncAnswerStream:
    """``rag.submit(prompt, **options)`` for ``async for``, with or without ``async with``.

    It waits for room in a full queue; with ``wait=False`` it raises QueueFull. ValueError for a ``streamer``.
    """
    if options.get("streamer") is not None:
        raise ValueError("astream reads the tokens itself; give streamer= to agenerate")
    return AsyncAnswerStream(lambda tokens: submitted(rag, prompt, {**options, "streamer": tokens}))


async def agenerate(rag: RagCache, prompt: Any, **options: Any) -> Answer:
    """``rag.submit(prompt, **options)`` and its answer, cancellable; a full queue as for :func:`astream`."""
    return await answered(await submitted(rag, prompt, options))


async def submitted(rag: RagCache, prompt: Any, options: Mapping[str, Any]) -> Request:
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
    scope = CancelScope()

    def inside() -> _T:
        with scope:
            return work(*args, **kwargs)

    try:
        return await asyncio.to_thread(inside)
    except asyncio.CancelledError:
        scope.cancel()
        raise
