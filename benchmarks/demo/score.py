"""How the demo's answers are scored: exact match with intervals, and what the query cache got wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchmarks.demo.chain import Asked, Wording
from ragcachekit.commands.bench.resample import Bootstrap

KINDS = ("a", "b", "c")
ALL = "all"


@dataclass(frozen=True)
class Score:
    """Exact match over questions of one type, with a 95 % interval.

    Where every question stands for itself the interval is Wilson's; where it was put in several
    wordings, whose answers hang together, it is a bootstrap over questions.
    """

    question_type: str
    exact_match: float
    low: float
    high: float
    n: int
    questions: int


@dataclass(frozen=True)
class Hits:
    """What the query cache returned.

    Attributes
    ----------
    lookups, hits : int
    wrong_hits : int
        Hits on an entry that another question made.
    harmful_hits : int
        Those among them that left out a chunk which the answer needs; the rest did no harm.
    """

    lookups: int
    hits: int
    wrong_hits: int
    harmful_hits: int

    @property
    def hit_rate(self) -> float:
        """Hits / lookups."""
        return self.hits / self.lookups if self.lookups else 0.0


def scores(asked: Sequence[Asked], seed: int = 0) -> list[Score]:
    """One score per question type that occurs, and one over all."""
    out = []
    for kind in (*KINDS, ALL):
        chosen = [a for a in asked if kind in (ALL, a.wording.question.kind)]
        if chosen:
            out.append(_score(kind, chosen, seed))
    return out


def count_hits(asked: Sequence[Asked]) -> Hits:
    """Tell hits from misses by the number of the search: the first question to show it made it."""
    makers: dict[int, Wording] = {}
    hits = wrong = harmful = 0
    for one in asked:
        if one.search not in makers:
            makers[one.search] = one.wording
            continue
        hits += 1
        if makers[one.search].question != one.wording.question:
            wrong += 1
            harmful += not one.has_evidence
    return Hits(len(asked), hits, wrong, harmful)


def evidence_recall(asked: Sequence[Asked]) -> float:
    """Share of questions for which every needed chunk was retrieved."""
    return fmean(one.has_evidence for one in asked)


def tokens_reused(asked: Sequence[Asked]) -> float:
    """Share of prompt tokens whose KV was reused, exactly or approximately."""
    links = [one.report["link"] for one in asked]
    reused = sum(link["exact_tokens"] + link["approximate_tokens"] for link in links)
    return float(reused / sum(link["prompt_tokens"] for link in links))


def recompute_ratio(asked: Sequence[Asked]) -> float:
    """Mean share of the cached rows that were recomputed."""
    return fmean(one.report["link"]["recompute_ratio"] for one in asked)


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of ``right`` out of ``n``."""
    if not 0 <= right <= n or n < 1:
        raise ValueError(f"need 0 <= right <= n and n >= 1, got {right} of {n}")
    share = right / n
    middle = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)


def bootstrap(groups: Sequence[Sequence[bool]], seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean when whole groups are drawn again."""
    columns = np.array([(sum(group), len(group)) for group in groups], dtype=float)
    found = Bootstrap(len(groups), seed).interval(columns, lambda sums: sums[:, 0] / sums[:, 1])
    if found is None:
        raise ValueError("a group is empty")
    return found


def _score(kind: str, asked: Sequence[Asked], seed: int) -> Score:
    groups: Mapping[str, list[bool]] = _by_question(asked)
    right, n = sum(one.right for one in asked), len(asked)
    low, high = wilson(right, n) if len(groups) == n else bootstrap(list(groups.values()), seed)
    return Score(kind, right / n, low, high, n, len(groups))


def _by_question(asked: Sequence[Asked]) -> dict[str, list[bool]]:
    groups: dict[str, list[bool]] = {}
    for one in asked:
        groups.setdefault(one.wording.question.text, []).append(one.right)
    return groups
