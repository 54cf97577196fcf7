"""Rows of answered prompts that are being stored; the next prompt with the same chunks waits for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Event

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.generate.run import Generated
from ragcachekit.plan.request import PromptRequest
from ragcachekit.prefix_tree.base import Match
from ragcachekit.threads import Condition
from ragcachekit.types import ENCODING_PREFIX, Ids

POLL = 0.05
"""Seconds after which a waiting request looks whether it was cancelled."""

LEAST = 1.0
"""Seconds that a request waits at least, if it must: threads have to start, and processors may be busy."""


@dataclass(frozen=True, eq=False)
class Pending:
    """What of one prompt is being stored: chunks by their ids, and beginnings that others may repeat.

    Others wait until ``until``, in seconds of :func:`time.monotonic`.
    """

    namespace: str
    chunks: frozenset[str]
    beginnings: tuple[Ids, ...]
    until: float

    @classmethod
    def of(cls, generated: Generated, turns: bool) -> Pending:
        """What is stored of a request, its first text aside; with ``turns`` also its turn.

        Waiting may take as long as its prefill did, or :data:`LEAST`: longer, computing the rows again would
        be quicker.
        """
        plan, own, chunks = generated.plan, generated.own, frozenset[str]()
        if own is not None and own.complete(generated.cache):
            items = [item for item in own.items if item.encoding.name != ENCODING_PREFIX]
            chunks = frozenset(item.key.chunk_id for item in items)
        beginnings = [plan.token_ids] if turns else []
        if plan.beginning is not None and (stop := _first_new(plan.beginning.match)):
            beginnings.append(plan.token_ids[:stop])
        namespace = plan.request.namespace if plan.request is not None else ""
        until = time.monotonic() + max(LEAST, generated.prefill or 0.0)
        return cls(namespace, chunks, tuple(beginnings), until)

    def concerns(self, request: PromptRequest, chunks: frozenset[str]) -> bool:
        """Whether a request with these chunks would reuse some of this."""
        if time.monotonic() >= self.until:
            return False
        ids = request.token_ids if self.beginnings else ()
        return any(ids[: len(b)] == b for b in self.beginnings) or not chunks.isdisjoint(self.chunks)


def _first_new(match: Match) -> int:
    """Where the first step ends that the tree did not have; the text before a first chunk does not count."""
    documents = [step.document for step in match.path]
    number = max(len(match), documents.index(True) if True in documents else 0)
    return sum(step.tokens for step in match.path[: number + 1]) if number < len(match.path) else 0


class PendingRows:
    """The segments that are being stored; nobody waits once ``closed`` is set. Thread safe."""

    def __init__(self, closed: Event) -> None:
        self._closed, self._changed = closed, Condition()
        self._pending: tuple[Pending, ...] = ()

    def add(self, pending: Pending) -> None:
        """Let requests wait for these segments."""
        with self._changed:
            self._pending = (*self._pending, pending)

    def discard(self, pending: Pending) -> None:
        """Wake the requests that wait for these: they are stored, or will not be."""
        with self._changed:
            self._pending = tuple(other for other in self._pending if other is not pending)
            self._changed.notify_all()

    def concern(self, request: PromptRequest) -> bool:
        """Whether one of the segments would be reused by the request."""
        if not self._pending or not request.reads_cache or self._closed.is_set():
            return False
        own = [pending for pending in self._pending if pending.namespace == request.namespace]
        chunks = frozenset(want.key.chunk_id for want in request.reusable)
        return any(pending.concerns(request, chunks) for pending in own)

    def wait(self, request: PromptRequest) -> float:
        """Wait while segments :meth:`concern` the request; returns the seconds.

        Raises
        ------
        Cancelled
            In a cancelled scope.
        """
        begun = time.monotonic()
        while self.concern(request):
            raise_if_cancelled()
            self._changed.wait_for(lambda: not self.concern(request), POLL)
        return time.monotonic() - begun
