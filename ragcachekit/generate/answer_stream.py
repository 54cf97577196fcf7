"""Answers as they are generated."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.forks import refuse_after_fork
from ragcachekit.generate.detokenizer import Detokenizer, TokenQueue
from ragcachekit.reports import Answer
from ragcachekit.threads import DaemonPool, Job

_T = TypeVar("_T")


class AnswerStream:
    """Iterates over pieces of text; generation runs in a thread of its own.

    Closing it early (``close``, leaving a ``with`` block, or dropping the iterator) cancels
    generation before the next layer of the prefill, or after the token in work. So does what interrupts
    the wait for a piece or for the answer, such as ``KeyboardInterrupt``.

    Parameters
    ----------
    produce : callable
        ``produce(streamer, cancel) -> Answer``, run in the thread.
    """

    def __init__(
        self, produce: Callable[[TokenQueue, threading.Event], Answer], detokenizer: Detokenizer
    ) -> None:
        self._pool = DaemonPool("ragcachekit-stream")
        self._cancel = self._pool.closed  # at exit, too
        self._outcome = _Outcome()
        tokens = TokenQueue()
        # Neither the thread nor the generator may hold this object: dropping it is how many end a stream.
        self._pieces = _pieces(tokens, detokenizer, self._outcome)
        weakref.finalize(self, self._cancel.set)
        work = partial(copy_context().run, _run, produce, tokens, self._cancel, self._outcome)
        if not self._wait_for(lambda: self._pool.submit(Job(work))):
            raise RuntimeError("can't start new thread")
        refuse_after_fork(self)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return self._wait_for(lambda: next(self._pieces))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        """The whole answer with its report; waits for the end of generation."""
        self._wait_for(self._outcome.complete.wait)  # not join: an interrupted one may forget its thread
        if self._outcome.error is not None:
            raise self._outcome.error
        assert self._outcome.answer is not None
        return self._outcome.answer

    def cancel(self) -> None:
        """Stop before the next layer of the prefill, or after the token in work; what was generated stays."""
        self._cancel.set()

    def close(self) -> None:
        """Cancel and wait."""
        self.cancel()
        self._pool.flush()
        self._pool.close()

    def _wait_for(self, wait: Callable[[], _T]) -> _T:
        """Who is interrupted here does not want the rest, and a traceback may keep the stream alive."""
        try:
            return wait()
        except Exception:
            raise
        except BaseException:
            self.cancel()
            raise


@dataclass
class _Outcome:
    """What became of the generation, once it is complete."""

    answer: Answer | None = None
    error: BaseException | None = None
    complete: threading.Event = field(default_factory=threading.Event)


def _run(
    produce: Callable[[TokenQueue, threading.Event], Answer],
    tokens: TokenQueue,
    cancel: threading.Event,
    outcome: _Outcome,
) -> None:
    try:
        outcome.answer = produce(tokens, cancel)
    except BaseException as error:
        outcome.error = error
    finally:
        cancel.set()  # the thread has no other job to wait for
        outcome.complete.set()
        tokens.end()


def _pieces(tokens: TokenQueue, detokenizer: Detokenizer, outcome: _Outcome) -> Iterator[str]:
    for ids in tokens:
        if piece := detokenizer.push(ids):
            yield piece
    if outcome.error is not None:
        raise outcome.error
    raise_if_cancelled()  # the tokens ended before the thread did: its error may still be to come
    if piece := detokenizer.finish():
        yield piece
