"""Cache-Craft (section 3.2): the tokens of a chunk that depended most on its former context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from ragcachekit.policies.base import Deviation, PlacedChunk, share, top
from ragcachekit.policies.craft.scores import Impact, fix_overhead, focused
from ragcachekit_kernels.dispatch import AttentionOptions, Rows, Spans, column_scores, span_sums

WINDOW = 3


@dataclass(frozen=True)
class Craft:
    """Recomputes ``ceil(CFO * tokens)`` tokens of every chunk, CFO = alpha CCI (1 - β').

    These are the tokens with the highest attention to other segments, which the encoder ``in-prompt``
    records. Other encodings count as having no context, and the first tokens are taken. The least ``alpha``
    that meets a quality target is found on a validation set.
    """

    alpha: float
    encoder: str | None = None
    reads_cache = True
    _kind = "craft"

    def __post_init__(self) -> None:
        if not (0 < self.alpha < math.inf):
            raise ValueError(f"{self._kind}:α needs a finite α > 0, got {self.alpha:g}")

    @property
    def name(self) -> str:
        """``craft:α``."""
        return f"{self._kind}:{self.alpha:g}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """The share of each chunk that its context requires."""
        return [p for chunk in chunks if not chunk.is_exact for p in self._of(chunk)]

    def _of(self, chunk: PlacedChunk) -> list[int]:
        impact = Impact.of(chunk.context, chunk.sums, chunk.tokens)
        count = share(fix_overhead(self.alpha, impact.cost(chunk.before)), chunk.tokens)
        outward = chunk.sums.get("outward", -torch.arange(chunk.tokens))
        return top(range(chunk.start, chunk.stop), outward, count)


@dataclass(frozen=True)
class CraftFocused(Craft):
    """:class:`Craft` that stops recomputing chunks outside the question's focus.

    The attention of the question's rows is summed layer by layer. When more than ``window`` layers have run,
    and the last ``window`` of them focus on the same chunks (:func:`~.scores.focused`), the rows of other
    chunks stop.
    """

    window: int = WINDOW
    _kind = "craft-focused"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"the window must be at least one layer, got {self.window}")

    def narrow(
        self, layer: int, layers: int, rows: Sequence[int], total: int, deviation: Deviation
    ) -> list[int]:
        """All of them: only :meth:`watch` observes the question."""
        return list(rows)

    def watch(self, chunks: Sequence[PlacedChunk], question: Sequence[int]) -> FocusWatch:
        """The state of one request."""
        return FocusWatch(chunks, question, self.window)


class FocusWatch:
    """State of one request: observes the forward, and stops rows of chunks outside the question's focus.

    ``chunks`` are all of the prompt, cached or not; one at its start is excluded as the attention sink.
    ``question`` are positions of the question's rows, the last ones of the forward.
    """

    def __init__(self, chunks: Sequence[PlacedChunk], question: Sequence[int], window: int) -> None:
        self._chunks = [chunk for chunk in chunks if chunk.start > 0]
        self._question = frozenset(question)
        self._window = window
        self._spans = Spans(tuple((chunk.start, chunk.stop) for chunk in self._chunks))
        self._asked = Rows(())
        self._scores = [0.0] * len(self._chunks)
        self._new: list[torch.Tensor] = []
        self._found: list[frozenset[int]] = []
        self.stopped_at: int | None = None
        """The first layer without the other chunks' rows."""

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: Sequence[int],
        options: AttentionOptions,
    ) -> None:
        """Record one layer's attention from the question to every chunk, summed over heads and rows."""
        asked = sum(1 for _ in takewhile(self._question.__contains__, reversed(positions)))
        if self.stopped_at is not None or not asked:
            return
        if len(self._asked) != asked:
            self._asked = Rows(tuple(positions[-asked:]))
        sums = column_scores(query[:, -asked:], key, self._asked, options)
        self._new.append(span_sums(sums, self._spans))

    @property
    def found(self) -> list[frozenset[int]]:
        """Per observed layer, indices of the chunks in focus; waits for the device."""
        new = torch.stack(self._new).tolist() if self._new else []
        self._new = []
        for sums in new:
            self._scores = [score + more for score, more in zip(self._scores, sums, strict=True)]
            self._found.append(focused(self._scores))
        return self._found

    def narrow(
        self, layer: int, layers: int, rows: Sequence[int], total: int, deviation: Deviation
    ) -> list[int]:
        """Rows of chunks in focus, once that is settled."""
        if self.stopped_at is None and len(self._found) + len(self._new) <= self._window:
            return list(rows)
        last = self.found[-self._window :]
        if self.stopped_at is None and len(set(last)) == 1:
            self.stopped_at = layer
        if self.stopped_at is None:
            return list(rows)
        away = {
            p
            for number, chunk in enumerate(self._chunks)
            if number not in last[-1]
            for p in range(chunk.start, chunk.stop)
        }
        return [p for p in rows if p not in away]
