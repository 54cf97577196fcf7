"""Generation from asyncio: the engine runs in worker threads; a cancelled task ends its generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ragcachekit.cancellation import CancelScope
from ragcachekit.reports import Answer

if TYPE_CHECKING:
    from ragcachekit.engine.rag_cache import RagCache

_P = ParamSpec("_P")
_T = TypeVar("_T")
_DONE = object()


class AsyncAnswerStream:
    """An answer as it is generated: an async context manager and an async iterator of text pieces.

    Leaving the context early, by ``break``, an error or cancellation, cancels the generation before its next
    layer or after its token. ``start`` returns the engine's stream.

    Examples
    --------
    >>> async with astream(rag, "Where does Ada live?", max_new_tokens=32) as stream:  # doctest: +SKIP
    ...     async for piece in stream:
    ...         print(piece, end="")
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._stream: Any = None

    async def __aenter__(self) -> AsyncAnswerStream:
        self._stream = self._start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stream.cancel()

    def __aiter__(self) -> AsyncAnswerStream:
        return self

    async def __anext__(self) -> str:
        piece = await asyncio.to_thread(next, self._stream, _DONE)
        if piece is _DONE:
            # The text can end before the request does (cold="now" encodes): do not wait for it in the loop.
            await asyncio.to_thread(getattr, self._stream, "answer")
            raise StopAsyncIteration
        return str(piece)

    @property
    def answer(self) -> Answer:
        """The whole answer with its report, once the iteration has ended."""
        answer: Answer = self._stream.answer
        return answer


def astream(rag: RagCache, prompt: Any, **options: Any) -> AsyncAnswerStream:
    """``rag.stream(prompt, **options)`` for ``async with`` and ``async for``."""
    return AsyncAnswerStream(lambda: rag.stream(prompt, **options))


async def agenerate(rag: RagCache, prompt: Any, **options: Any) -> Answer:
    """``rag.generate(prompt, **options)`` without blocking the loop, and cancellable."""
    async with astream(rag, prompt, **options) as stream:
        async for _ in stream:
            pass
        return stream.answer


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
