"""Answers that begin while their documents are still searched for (RAGCache, section 5.3, algorithm 2)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from ragcachekit.engine.request import Request
from ragcachekit.errors import Cancelled
from ragcachekit.prompt.parser import PromptLike
from ragcachekit.types import check_deadline, positive

if TYPE_CHECKING:
    from ragcachekit.engine.rag_cache import RagCache

MIN_RIGHT = 0.25
"""Share of right lists at a stage below which nothing is submitted there."""
_OF_ONE_CALL = ("deadline", "wait", "streamer")  # which decide nothing about the answer
_NEWEST = 0.25  # least weight of the newest search in that share; a mean until the fourth


@dataclass(frozen=True)
class PipelineStats:
    """Searches so far, provisional requests submitted in them, and how many of those were the right ones."""

    searches: int = 0
    provisional: int = 0
    right: int = 0


class SpeculativePipeline:
    """Submits the prompts of a staged search's provisional results; the last stage decides. Thread safe.

    A provisional request is cancelled when the next stage changes its prompt; what it has encoded stays. If
    its prompt is the final one, it is the request that is returned, running or done.

    Every search shows at which stages the list was already final. Stages where that is rare are not
    submitted: a wrong prefill on the processor that searches would slow the search down. ``stats`` counts
    what was submitted and right. Nothing provisional is submitted while ``max_waiting`` requests wait.

    Examples
    --------
    >>> pipeline = SpeculativePipeline(rag)  # doctest: +SKIP
    >>> with pipeline.begin() as speculation:  # doctest: +SKIP
    ...     for hits in index.search_stages(vector, 5):
    ...         speculation.offer(prompt := make_prompt(hits))
    ...     request = speculation.submit(prompt)
    """

    def __init__(self, rag: RagCache, *, max_waiting: int = 1) -> None:
        self.rag, self._max_waiting = rag, positive("max_waiting", max_waiting)
        self._lock = Lock()
        self._right: list[float] = []  # share of right lists, by stage
        self._seen = Counter[int]()  # searches that had the stage
        self.stats = PipelineStats()

    def begin(
        self, *, deadline: float | None = None, wait: bool | float = False, **options: Any
    ) -> Speculation:
        """One search, whose stages the caller offers. Arguments are those of its final ``rag.submit``.

        ValueError for a ``streamer``, from which nothing could be taken back: use the request's ``stream()``.
        """
        check_deadline(deadline)
        if options.get("streamer") is not None:
            raise ValueError("provisional answers may be wrong: take the text from the request's stream()")
        return Speculation(self, deadline, options)

    def is_worth_it(self, stage: int) -> bool:
        """Whether to submit what is found at a stage."""
        likely = stage >= len(self._right) or self._right[stage] >= MIN_RIGHT
        return likely and self.rag.queue.waiting < self._max_waiting

    def learn(self, right: Sequence[bool], provisional: int, was_right: bool) -> None:
        """Note at which stages the prompt was that of the last one; the latest searches count most."""
        with self._lock:
            self._right += [0.0] * (len(right) - len(self._right))
            self._seen.update(range(len(right)))
            for stage, same in enumerate(right):
                weight = max(_NEWEST, 1 / self._seen[stage])
                self._right[stage] += weight * (same - self._right[stage])
            done = self.stats
            self.stats = PipelineStats(
                done.searches + 1, done.provisional + provisional, done.right + was_right
            )


class Speculation:
    """One search of a :class:`SpeculativePipeline`, and the request of its newest documents.

    It stands for the engine where the final prompt is submitted. A deadline counts from the beginning of the
    search. An error inside of its ``with`` closes it. Two stages are the same where their prompts are equal.
    """

    def __init__(
        self, pipeline: SpeculativePipeline, deadline: float | None, options: dict[str, Any]
    ) -> None:
        self._pipeline, self._rag, self._options = pipeline, pipeline.rag, options
        self.queue = pipeline.rag.queue
        self._end = time.monotonic() + (inf if deadline is None else deadline)
        self._prompts: list[PromptLike] = []
        self._submitted: list[int] = []  # the stages at which a prompt was submitted
        self._request: Request | None = None
        self._has_ended = self._is_closed = False
        self._report = {"search": "cached", "stages": 0, "provisional": 0, "right": False}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self.close()

    def watch(
        self, prompt: Callable[[tuple[Any, ...]], PromptLike]
    ) -> Callable[[tuple[Any, ...] | None], None]:
        """A function that offers the prompts of documents; None is a search without stages.

        No prompt is an error: that of the final documents is made again.
        """

        def on_stage(documents: tuple[Any, ...] | None) -> None:
            self._report["search"] = "not staged" if documents is None else "staged"
            if documents is not None:
                with suppress(Exception):
                    self.offer(prompt(documents))

        return on_stage

    def offer(self, prompt: PromptLike) -> None:
        """Submit the prompt of a stage, unless it is unlikely to be right. Cancelled once closed."""
        if self._is_closed:
            raise Cancelled("nobody waits for this search any more")
        self._report["search"], stage = "staged", len(self._prompts)
        self._prompts.append(prompt)
        if self._request is not None and prompt != self._prompts[-2]:
            self._request.cancel()
            self._request = None
        if self._request is None and self._pipeline.is_worth_it(stage):
            with suppress(Exception):  # of the last prompt it is raised in the end
                self._request = self._rag.submit(prompt, deadline=self._left(), **self._options)
                self._submitted.append(stage)
        self._cancel_if_closed()

    def submit(self, prompt: PromptLike, **how: Any) -> Request:
        """The request of the last documents' prompt; from the second call on, that of any prompt.

        Arguments and errors as of ``rag.submit``. A provisional request that failed is submitted again.
        """
        if self._has_ended:
            return self._rag.submit(prompt, **how)
        self._has_ended, request, stages = True, self._request, len(self._prompts)
        early = [stage for stage in self._submitted if stage < stages - 1]
        options = {name: value for name, value in how.items() if name not in _OF_ONE_CALL}
        is_last = self._prompts[-1:] == [prompt] and options == self._options
        right = False
        if request is not None and is_last and not request.failed():
            right = self._submitted[-1] in early
        else:
            if request is not None:
                request.cancel()
            request = self._request = self._rag.submit(prompt, **how | {"deadline": self._left()})
        self._cancel_if_closed()
        self._report |= {"stages": stages, "provisional": len(early), "right": right}
        if stages:
            self._pipeline.learn([one == prompt for one in self._prompts[:-1]], len(early), right)
        return request

    def close(self) -> None:
        """Cancel the request, if it is not done, and what is offered from now on."""
        self._is_closed = True
        self._cancel_if_closed()

    def report(self) -> dict[str, Any]:
        """Whether the search was "staged", "not staged" or needless ("cached"), its stages, its requests.

        ``provisional`` were submitted before the last stage; ``right``: one of them is the answer's.
        """
        return dict(self._report)

    def _left(self) -> float | None:
        return None if self._end == inf else max(0.0, self._end - time.monotonic())

    def _cancel_if_closed(self) -> None:
        if self._is_closed and self._request is not None:
            self._request.cancel()
