"""Answers that begin while their documents are still searched for (RAGCache, section 5.3, algorithm 2)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from ragcachekit.engine.request import Request
from ragcachekit.prompt.parser import PromptLike
from ragcachekit.types import check_deadline, positive

if TYPE_CHECKING:
    from ragcachekit.engine.rag_cache import RagCache

_Document = TypeVar("_Document")

MIN_RIGHT = 0.25
"""Share of right lists at a stage below which nothing is submitted there."""
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
    its prompt is that of the last stage, it is the request that is returned, running or done.

    Every search shows at which stages the list was already final. Stages where that is rare are not
    submitted: a wrong prefill on the processor that searches would slow the search down. ``stats`` counts
    what was submitted and right. Nothing provisional is submitted while ``max_waiting`` requests wait in the
    queue.

    Examples
    --------
    >>> pipeline = SpeculativePipeline(rag)  # doctest: +SKIP
    >>> request = pipeline.submit(index.search_stages(vector, 5), make_prompt)  # doctest: +SKIP
    >>> request.result().text  # doctest: +SKIP
    """

    def __init__(self, rag: RagCache, *, max_waiting: int = 1) -> None:
        self._rag, self._max_waiting = rag, positive("max_waiting", max_waiting)
        self._lock = Lock()
        self._right: list[float] = []  # share of right lists, by stage
        self._seen = Counter[int]()  # searches that had the stage
        self.stats = PipelineStats()

    def submit(
        self,
        stages: Iterable[Sequence[_Document]],
        prompt: Callable[[Sequence[_Document]], PromptLike],
        *,
        deadline: float | None = None,
        wait: bool | float = False,
        **options: Any,
    ) -> Request:
        """Run the search in this thread and return the request of its last documents.

        Parameters
        ----------
        stages : iterable of sequences
            Provisional results, the last one final: ``index.search_stages(...)`` of a
            :class:`~ragcachekit.DocumentIndex`. An error of the search ends the provisional request.
        prompt : callable
            Makes the prompt of a stage's documents. Two stages are the same where their prompts are equal.
        deadline, wait, **options
            As of ``rag.submit``; ``wait`` is for the last prompt alone. No ``streamer``, as what it was given
            could not be taken back: use the request's ``stream()``.

        Raises
        ------
        ValueError
            For a search without any stage, or a ``streamer``.
        QueueFull
            If there is no room for the last prompt; and the other errors of ``rag.submit``.
        """
        if options.get("streamer") is not None:
            raise ValueError("provisional answers may be wrong: take the text from the request's stream()")
        check_deadline(deadline)
        end = time.monotonic() + (inf if deadline is None else deadline)
        prompts: list[PromptLike] = []
        submitted: list[int] = []  # the stages at which a prompt was submitted
        request: Request | None = None

        def submit(asked: PromptLike, wait: bool | float) -> Request:
            left = None if deadline is None else max(0.0, end - time.monotonic())
            return self._rag.submit(asked, deadline=left, wait=wait, **options)

        try:
            for stage, documents in enumerate(stages):
                prompts.append(prompt(documents))
                if request is not None and prompts[-1] != prompts[-2]:
                    request.cancel()
                    request = None
                if request is None and self._is_worth_it(stage):
                    with suppress(Exception):  # of the last prompt it is raised in the end
                        request = submit(prompts[-1], False)
                        submitted.append(stage)
            if not prompts:
                raise ValueError("the search had no stage; its last one has to give the final documents")
            final = request or submit(prompts[-1], wait)
        except BaseException:
            if request is not None:
                request.cancel()
            raise
        early = [stage for stage in submitted if stage < len(prompts) - 1]
        self._learn(prompts, len(early), request is not None and submitted[-1] in early)
        return final

    def _is_worth_it(self, stage: int) -> bool:
        likely = stage >= len(self._right) or self._right[stage] >= MIN_RIGHT
        return likely and self._rag.queue.waiting < self._max_waiting

    def _learn(self, prompts: Sequence[PromptLike], provisional: int, was_right: bool) -> None:
        """Note at which stages the prompt was that of the last one; the latest searches count most."""
        *earlier, last = prompts
        with self._lock:
            self._right += [0.0] * (len(earlier) - len(self._right))
            self._seen.update(range(len(earlier)))
            for stage, asked in enumerate(earlier):
                weight = max(_NEWEST, 1 / self._seen[stage])
                self._right[stage] += weight * ((asked == last) - self._right[stage])
            done = self.stats
            self.stats = PipelineStats(
                done.searches + 1, done.provisional + provisional, done.right + was_right
            )
