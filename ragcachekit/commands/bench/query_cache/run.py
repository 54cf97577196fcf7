"""Query-cache bench: hit rates, latency and recall of results (Proximity, section 4)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ragcachekit.commands.bench.query_cache.answers import AnswerScores
from ragcachekit.commands.bench.query_cache.workload import Workload
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval
from ragcachekit.retrieval.candidates import FACTOR
from ragcachekit.retrieval.index import open_index
from ragcachekit.retrieval.partition import Partition
from ragcachekit.retrieval.proximity import ProximityCache

SWEEP = "sweep"
PARTITION = Partition("bench", 1)
RESULTS = 4
TOLERANCES = (0.0, 0.02, 0.05, 0.1)

Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What is varied: every capacity with every tolerance (cosine distance).

    Without ``capacities`` they are a tenth, half and all of the different questions. The workload is asked
    ``passes`` times, each in the same order. With ``reorder``, as over an index of the retriever's own, a hit
    puts the cached question's candidates in order for its own; else it returns the cached list (the paper).
    """

    capacities: tuple[int, ...] = ()
    tolerances: tuple[float, ...] = TOLERANCES
    eviction: str = "fifo"
    passes: int = 1
    guard: bool = True
    reorder: bool = True

    def cases(self, distinct: int) -> Iterator[tuple[int, float]]:
        """Capacity and tolerance of every replay."""
        sizes = {max(1, distinct // 10), max(1, distinct // 2), distinct}
        yield from product(self.capacities or sorted(sizes), self.tolerances)


@dataclass(frozen=True)
class Searched:
    """The index's own answer to each question of a workload, and the milliseconds it took.

    ``candidates`` are the results and those behind them.
    """

    candidates: tuple[tuple[int, ...], ...]
    ms: tuple[float, ...]

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """The results."""
        return tuple(found[:RESULTS] for found in self.candidates)


def run(
    workload: Workload,
    sweep: Sweep | None = None,
    index: str = "faiss-flat",
    progress: bool = False,
    answers: AnswerScores | None = None,
) -> BenchReport:
    """Replay a workload over an index; rows of the part ``sweep`` as of :func:`replays`."""
    built = open_index(index, workload.chunks.shape[1])
    built.add(range(len(workload.chunks)), workload.chunks)
    count = FACTOR * RESULTS if sweep is None or sweep.reorder else RESULTS
    found = searched(workload, lambda question: built.search(question, count).ids, progress)
    cases = replays(workload, found, sweep, progress, answers)
    rows = [{"part": SWEEP, "index": index, **row} for row in cases]
    return BenchReport("query-cache", f"{workload.name}; {index}", 0, tuple(rows))


def searched(
    workload: Workload, search: Callable[[NDArray[np.float32]], Sequence[Any]], progress: bool = False
) -> Searched:
    """Search for every question without a cache."""
    ids, ms = [], []
    for question in tqdm(workload.questions, "search", unit="question", disable=not progress):
        start = time.perf_counter()
        ids.append(tuple(map(int, search(question))))
        ms.append((time.perf_counter() - start) * 1e3)
    return Searched(tuple(ids), tuple(ms))


def replays(
    workload: Workload,
    found: Searched,
    sweep: Sweep | None = None,
    progress: bool = False,
    answers: AnswerScores | None = None,
) -> Iterator[Row]:
    """One row per capacity and tolerance; embedding the questions is in no figure.

    A miss costs its lookup, its insert and the time that its own search took without a cache.
    ``latency_saved`` is the share of all search time; ``result_recall`` the mean share of the index's own
    results that are returned. ``wrong_hits`` are hits on another question's entry, as a share of all
    lookups. ``evidence`` is the share of lookups that return a chunk with the answer, and ``answer_f1``
    scores a model's answers over what the last pass returned.
    """
    sweep = sweep or Sweep()
    cases = list(sweep.cases(len(set(workload.distinct))))
    for capacity, tolerance in tqdm(cases, "replay", unit="case", disable=not progress):
        row, returned = _replay(workload, found, sweep, capacity, tolerance)
        yield row if answers is None else row | answers.row(returned, found.ids)


def _replay(
    workload: Workload, found: Searched, sweep: Sweep, capacity: int, tolerance: float
) -> tuple[Row, list[tuple[int, ...]]]:
    cache = ProximityCache(capacity, tolerance, "cosine", sweep.eviction)
    retrieval: CachedRetrieval[int] = CachedRetrieval(cache, guard=sweep.guard)
    results = found.ids
    returned: list[tuple[int, ...]] = [()] * len(results)
    lookups_us, latency_ms, recall, wrong, evidence = list[float](), 0.0, 0.0, 0, 0
    for at in [*range(len(workload.texts))] * sweep.passes:
        start = time.perf_counter_ns()
        asked = retrieval.lookup(workload.questions[at], PARTITION, question=workload.texts[at])
        looked_up = time.perf_counter_ns()
        maker, ids = at, results[at]
        if asked.result.hit:
            maker = asked.result.documents[0]
            ids = results[maker]
            if sweep.reorder and asked.result.distance:
                ids = _reordered(found.candidates[maker], workload, at)
        else:
            retrieval.insert(asked, [(at, at)])
            latency_ms += found.ms[at]
        latency_ms += (time.perf_counter_ns() - start) / 1e6
        lookups_us.append((looked_up - start) / 1e3)
        right, returned[at] = set(results[at]), ids
        recall += len(right.intersection(ids)) / len(right) if right else 1.0
        wrong += workload.distinct[maker] != workload.distinct[at]
        evidence += bool(workload.evidence and workload.evidence[at].intersection(ids))
    n, stats = len(lookups_us), retrieval.stats()
    uncached = sum(found.ms) * sweep.passes
    row = {
        "capacity": capacity,
        "tolerance": tolerance,
        "hit_rate": stats.hit_rate,
        "wrong_hits": wrong / n,
        "lookup_us": statistics.median(lookups_us),
        "latency_ms": latency_ms / n,
        "latency_ms_uncached": uncached / n,
        "latency_saved": 1 - latency_ms / uncached,
        "result_recall": recall / n,
        "n": n,
    }
    if workload.evidence:
        pairs = zip(workload.evidence, results, strict=True)
        own = [bool(chunks.intersection(ids)) for chunks, ids in pairs]
        row |= {"evidence": evidence / n, "evidence_uncached": statistics.fmean(own)}
    return row, returned


def _reordered(candidates: tuple[int, ...], workload: Workload, at: int) -> tuple[int, ...]:
    """The nearest candidates to a question."""
    similar = workload.chunks[list(candidates)] @ workload.questions[at]
    return tuple(candidates[place] for place in np.argsort(-similar, kind="stable")[:RESULTS])
