"""Answers as they are generated."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from importlib import import_module
from typing import Any, Self

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.generate.detokenizer import Detokenizer, TokenQueue
from ragcachekit.reports import Answer
from ragcachekit.reports.base import text_html
from ragcachekit.threads import DaemonPool, Job, refuse_after_fork


class AnswerStream:
    """An iterator over pieces of text; generation runs in a thread of its own.

    Closing it early (``close``, leaving a ``with`` block, dropping the iterator, or an interrupted wait)
    cancels generation before the next layer of the prefill, or after the current token. The thread runs
    ``produce(streamer, cancel) -> Answer``.
    """

    def __init__(
        self, produce: Callable[[TokenQueue, threading.Event], Answer], detokenizer: Detokenizer
    ) -> None:
        self._pool = DaemonPool("ragcachekit-stream")
        self._cancel = self._pool.closed  # at exit, too
        self._outcome: Future[Answer] = Future()
        tokens = TokenQueue()
        # Neither the thread nor the generator may hold this object: dropping it is how many end a stream.
        self._pieces = _pieces(tokens, detokenizer, self._outcome)
        weakref.finalize(self, self._cancel.set)
        work = partial(copy_context().run, _run, produce, tokens, self._cancel, self._outcome)
        if not self._pool.submit(Job(work)):
            raise RuntimeError("can't start new thread")
        refuse_after_fork(self)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except KeyboardInterrupt:  # its traceback may keep the stream alive
            self.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        """The whole answer with its report; waits for the end of generation."""
        try:
            return self._outcome.result()
        except KeyboardInterrupt:
            self.cancel()
            raise

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
        self._cancel.set()

    def close(self) -> None:
        """Cancel and wait."""
        self.cancel()
        self._pool.flush()
        self._pool.close()


def _run(
    produce: Callable[[TokenQueue, threading.Event], Answer],
    tokens: TokenQueue,
    cancel: threading.Event,
    outcome: Future[Answer],
) -> None:
    try:
        outcome.set_result(produce(tokens, cancel))
    except BaseException as error:
        outcome.set_exception(error)
    finally:
        cancel.set()  # the thread has no other job to wait for
        tokens.end()


def _pieces(tokens: TokenQueue, detokenizer: Detokenizer, outcome: Future[Answer]) -> Iterator[str]:
    for ids in tokens:
        if piece := detokenizer.push(ids):
            yield piece
    if outcome.done():
        outcome.result()
    raise_if_cancelled()  # the tokens ended before the thread did: its error may still be to come
    if piece := detokenizer.finish():
        yield piece
