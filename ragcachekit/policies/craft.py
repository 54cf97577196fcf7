"""Cache-Craft (section 3.1, 3.2): the tokens of a chunk that depended most on its former context.

Contexts are ids of segments in order; repeated ids (separators) are matched by their number of occurrence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, takewhile

import torch
from torch import Tensor

from ragcachekit.policies.base import Deviation, PlacedChunk, share, top
from ragcachekit_kernels.dispatch import AttentionOptions, Rows, Spans, column_scores, span_sums

WINDOW = 3

NO_IMPACT = 0.5
"""CCI of KV without context: the logistic function of 0."""


@dataclass(frozen=True)
class Impact:
    """How much one entry's KV depends on its context.

    ``inter`` is the attention from the chunk to each segment of ``context``, summed over heads and rows, mean
    over layers; ``cci`` the cache context impact, 0.5 to 1.
    """

    context: tuple[str, ...] = ()
    inter: tuple[float, ...] = ()
    cci: float = NO_IMPACT

    @classmethod
    def of(cls, context: Sequence[str], sums: Mapping[str, Tensor], tokens: int) -> Impact:
        """From the sums of an ``in-prompt`` entry of ``tokens`` tokens; others count as without context.

        ``sums`` has ``inter`` ``[layers, segments]``, ``intra`` ``[layers]`` and ``behind`` ``[segments]``
        (their lengths); see :class:`ragcachekit.model.kv.ChunkKV`.
        """
        if "inter" not in sums:
            return cls()
        inter, lengths = sums["inter"].double(), sums["behind"].double()
        outer = float((inter / lengths).sum(1).mean()) / tokens
        inner = float(sums["intra"].double().mean()) / tokens**2
        return cls(tuple(context), tuple(inter.mean(0).tolist()), context_impact(outer, inner))

    def overlap(self, before: Sequence[str]) -> float:
        """β': the share of that attention to segments in ``before``, reduced by disorder."""
        return prefix_overlap(self.context, self.inter, before) * (1 - order_penalty(self.context, before))

    def cost(self, before: Sequence[str]) -> float:
        """``CCI (1 - β')``, 0 to 1: the share to recompute at α = 1."""
        return self.cci * (1 - self.overlap(before))


@dataclass(frozen=True)
class Craft:
    """Recomputes ``ceil(CFO * tokens)`` tokens of every chunk, CFO = min(1, alpha CCI (1 - β')) (eq. 12).

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
        return f"{self._kind}:{self.alpha:g}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        return [p for chunk in chunks if not chunk.is_exact for p in self._of(chunk)]

    def _of(self, chunk: PlacedChunk) -> list[int]:
        impact = Impact.of(chunk.context, chunk.sums, chunk.tokens)
        count = share(min(1.0, self.alpha * impact.cost(chunk.before)), chunk.tokens)
        outward = chunk.sums.get("outward", -torch.arange(chunk.tokens))
        return top(range(chunk.start, chunk.stop), outward, count)


@dataclass(frozen=True)
class CraftFocused(Craft):
    """:class:`Craft` that stops recomputing chunks outside the question's focus.

    The attention of the question's rows is summed layer by layer. When more than ``window`` layers have run,
    and the last ``window`` of them focus on the same chunks (:func:`focused`), rows of other chunks stop.
    """

    window: int = WINDOW
    _kind = "craft-focused"

    def narrow(
        self, layer: int, layers: int, rows: Sequence[int], total: int, deviation: Deviation
    ) -> list[int]:
        """All of them: only :meth:`track` observes the question."""
        return list(rows)

    def track(self, chunks: Sequence[PlacedChunk], question: Sequence[int]) -> FocusTracker:
        return FocusTracker(chunks, question, self.window)


class FocusTracker:
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
        self._new: list[Tensor] = []
        self._found: list[frozenset[int]] = []  # per observed layer, the chunks in focus
        self._settled: frozenset[int] | None = None

    def observe(
        self, layer: int, query: Tensor, key: Tensor, positions: Sequence[int], options: AttentionOptions
    ) -> None:
        """Record one layer's attention from the question to every chunk, summed over heads and rows."""
        asked = sum(1 for _ in takewhile(self._question.__contains__, reversed(positions)))
        if self._settled is not None or not asked:
            return
        if len(self._asked) != asked:
            self._asked = Rows(tuple(positions[-asked:]))
        sums = column_scores(query[:, -asked:], key, self._asked, options)
        self._new.append(span_sums(sums, self._spans))

    def narrow(
        self, layer: int, layers: int, rows: Sequence[int], total: int, deviation: Deviation
    ) -> list[int]:
        """Rows of chunks in focus, once that is settled."""
        if self._settled is None and len(self._found) + len(self._new) > self._window:
            self._settle()
        if self._settled is None:
            return list(rows)
        others = [chunk for number, chunk in enumerate(self._chunks) if number not in self._settled]
        away = {p for chunk in others for p in range(chunk.start, chunk.stop)}
        return [p for p in rows if p not in away]

    def _settle(self) -> None:
        """Rank the chunks after each layer; waits for the device."""
        for sums in torch.stack(self._new).tolist() if self._new else ():
            self._scores = [score + more for score, more in zip(self._scores, sums, strict=True)]
            self._found.append(focused(self._scores))
        self._new = []
        last = self._found[-self._window :]
        if len(set(last)) == 1:
            self._settled = last[-1]


def context_impact(outer: float, inner: float) -> float:
    """CCI = 1 / (1 + exp(-a/b)), paper eq. 11, of normalised inter (a) and intra (b) attention."""
    if inner <= 0:
        return 1.0 if outer > 0 else NO_IMPACT
    return 1 / (1 + math.exp(-outer / inner))


def prefix_overlap(old: Sequence[str], inter: Sequence[float], new: Sequence[str]) -> float:
    """β, paper eq. 6: the share of ``inter`` (one per old segment) that went to segments in ``new``."""
    if not old:
        return 0.0 if new else 1.0
    present = set(_numbered(new))
    total = math.fsum(inter)
    kept = math.fsum(a for id, a in zip(_numbered(old), inter, strict=True) if id in present)
    # If all attention went into a sink, segments count by number.
    return kept / total if total > 0 else len(present & set(_numbered(old))) / len(old)


def order_penalty(old: Sequence[str], new: Sequence[str]) -> float:
    """γ, paper eq. 7: the share of discordant pairs (Kendall) among the segments in both."""
    place = {id: at for at, id in enumerate(_numbered(new))}
    now = [place[id] for id in _numbered(old) if id in place]
    if len(now) < 2:
        return 0.0
    return sum(a > b for a, b in combinations(now, 2)) / math.comb(len(now), 2)


def focused(scores: Sequence[float]) -> frozenset[int]:
    """Indices of the chunks in the question's focus (paper algorithm 1, lines 4 to 9).

    Gaps between descending scores, as shares of their sum, have a running entropy; the cut is where it grows
    most. All chunks if there are fewer than three, or no gap.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    gaps = [scores[a] - scores[b] for a, b in pairwise(order)]
    total = math.fsum(gaps)
    if len(scores) < 3 or total <= 0:
        return frozenset(order)
    shares = [gap / total for gap in gaps]
    growth = [-p * math.log(p) if p > 0 else 0.0 for p in shares[1:]]  # h_{i+1} - h_i, i from 1
    return frozenset(order[: growth.index(max(growth)) + 1])


def _numbered(ids: Sequence[str]) -> list[tuple[str, int]]:
    return [(id, ids[:at].count(id)) for at, id in enumerate(ids)]
