"""Rows of answered prompts that are being stored; the next prompt with the same chunks waits for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Event

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.generate.run import Generated
from ragcachekit.plan.request import PromptRequest
from ragcachekit.threads import Condition
from ragcachekit.types import ENCODING_PREFIX

POLL = 0.05
"""Seconds after which a waiting request looks whether it was cancelled."""

LEAST = 1.0
"""Seconds that a request waits at least, if it must: threads have to start, and processors may be busy."""

Ids = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Pending:
    """Segments of one prompt: chunk ids, and for the knowledge tree all ids from the prompt's start.

    ``turn`` are the tokens of a prompt that is stored with its answer, for the next turn. Others wait until
    ``until``, in seconds of :func:`time.monotonic`.
    """

    namespace: str
    segments: frozenset[Ids]
    turn: tuple[int, ...]
    until: float

    @classmethod
    def of(cls, generated: Generated, turns: bool) -> Pending:
        """What is stored of a request, its first text aside; with ``turns`` also its turn.

        Waiting may take as long as its prefill did, or :data:`LEAST`: longer, computing the rows again would
        be quicker.
        """
        plan, own, segments = generated.plan, generated.own, set[Ids]()
        if own is not None and own.complete(generated.cache):
            items = [item for item in own.items if item.encoding.name != ENCODING_PREFIX]
            segments |= {(item.key.chunk_id,) for item in items}
        if plan.beginning is not None:
            match, ids = plan.beginning.match, Ids()
            for number, step in enumerate(match.path):
                ids += step.ids
                if number >= len(match) and step.document:
                    segments.add(ids)
        namespace = plan.request.namespace if plan.request is not None else ""
        turn = plan.token_ids if turns else ()
        return cls(
            namespace, frozenset(segments), turn, time.monotonic() + max(LEAST, generated.prefill or 0.0)
        )

    def concerns(self, request: PromptRequest, segments: frozenset[Ids]) -> bool:
        """Whether a request with these segments would reuse some of this."""
        if time.monotonic() >= self.until:
            return False
        is_next = bool(self.turn) and request.token_ids[: len(self.turn)] == self.turn
        return is_next or not segments.isdisjoint(self.segments)


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
        segments = _segments(request, any(len(ids) > 1 for pending in own for ids in pending.segments))
        return any(pending.concerns(request, segments) for pending in own)

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


def _segments(request: PromptRequest, beginnings: bool) -> frozenset[Ids]:
    """What a request may reuse: its chunks, and with ``beginnings`` the prompt's up to each."""
    chunks = frozenset((want.key.chunk_id,) for want in request.reusable)
    if not beginnings:  # which take memory by the square of the chunks
        return chunks
    return chunks.union((*want.before, want.key.chunk_id) for want in request.wanted)
