"""Answers as they are generated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from ragcachekit.generate.streaming import Detokenizer, TokenQueue
from ragcachekit.types import Answer


class AnswerStream:
    """Iterates over pieces of text; generation runs in a thread of its own.

    Closing it early (``close``, leaving a ``with`` block, or dropping the iterator) cancels
    generation after the token in work.

    Parameters
    ----------
    produce : callable
        ``produce(streamer, cancel) -> Answer``, run in the thread.
    detokenizer : Detokenizer
    """

    def __init__(
        self, produce: Callable[[TokenQueue, threading.Event], Answer], detokenizer: Detokenizer
    ) -> None:
        self._tokens = TokenQueue()
        self._cancel = threading.Event()
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._detokenizer = detokenizer
        self._pieces = self._iterate()
        self._thread = threading.Thread(
            target=self._run, args=(produce,), name="ragcachekit-stream", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        """The whole answer with its report; waits for the end of generation."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def cancel(self) -> None:
        """Stop after the token in work; what was generated stays."""
        self._cancel.set()

    def close(self) -> None:
        """Cancel and wait."""
        self.cancel()
        self._thread.join()

    def _run(self, produce: Callable[[TokenQueue, threading.Event], Answer]) -> None:
        try:
            self._answer = produce(self._tokens, self._cancel)
        except BaseException as error:
            self._error = error
        finally:
            self._tokens.end()

    def _iterate(self) -> Iterator[str]:
        try:
            for ids in self._tokens:
                if piece := self._detokenizer.push(ids):
                    yield piece
            if self._error is not None:
                raise self._error
            if piece := self._detokenizer.finish():
                yield piece
        finally:
            self.cancel()
