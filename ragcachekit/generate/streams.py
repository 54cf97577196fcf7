"""Token ids to text as they come: whole characters only, and no part of a stop string."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Text up to the first stop string, and whether there was one."""
    found = [at for s in stop if (at := text.find(s)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


class Detokenizer:
    """Turns tokens into final text; stop strings and what follows them are left out."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._given = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that cannot change any more."""
        self._ids.extend(ids)
        text, stopped = cut_at_stop(self._decode(self._ids), self._stop)
        if stopped:
            return self._give(text)
        if text.endswith("�"):
            # An unfinished character: its bytes are spread over several tokens.
            return ""
        return self._give(text[: len(text) - self._held(text)])

    def finish(self) -> str:
        """The rest of the text."""
        return self._give(cut_at_stop(self._decode(self._ids), self._stop)[0])

    def _held(self, text: str) -> int:
        """Length of the longest end of ``text`` that may begin a stop string."""
        return max(
            (n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])),
            default=0,
        )

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._given += len(new)
        return new


class RequestStreamer(BaseStreamer):  # type: ignore[misc]
    """A streamer that gets the prompt once, whatever begins again, and is ended once.

    ``streamed``: whether tokens of the answer went through it.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._prompt_given = self._prompt_seen = False
        self.streamed = self.ended = False

    def restart(self) -> None:
        """Expect the prompt once more: generation begins again before its first token."""
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Pass on the prompt, which comes first, or a token."""
        self.streamed = self.streamed or self._prompt_seen
        if self._prompt_seen or not self._prompt_given:
            self._inner.put(value)
        self._prompt_given = self._prompt_seen = True

    def end(self) -> None:
        """End it; later calls do nothing."""
        if not self.ended:
            self.ended = True
            self._inner.end()


class TokenQueue(BaseStreamer):  # type: ignore[misc]
    """Generated token ids, from the generating thread to the reading one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Add the ids of one step; the first call carries the prompt and is dropped."""
        if self._prompt_seen:
            self._queue.put(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """End the iteration; may be called more than once."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[list[int]]:
        while (ids := self._queue.get()) is not None:
            yield ids
