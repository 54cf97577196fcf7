"""``python -m benchmarks query-cache``: hit rates, search time saved, recall (Proximity, section 4)."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from tqdm.auto import tqdm

from benchmarks.output import Plot, written
from benchmarks.query_cache.workload import Workload, of_dataset
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show
from ragcachekit.commands.report import BenchReport
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval
from ragcachekit.retrieval.index import open_index
from ragcachekit.retrieval.partition import Partition
from ragcachekit.retrieval.plumbing import FACTOR
from ragcachekit.retrieval.proximity import ProximityCache

SWEEP = "sweep"
PARTITION = Partition("bench", 1)
RESULTS = 4
PANELS = {
    "hit_rate": "hit rate",
    "latency_saved": "search time saved",
    "result_recall": "recall of results",
    "evidence": "chunk with the answer found",
    "wrong_hits": "hits on another question",
}
TOLERANCES = (0.0, 0.02, 0.05, 0.1)

Row = dict[str, Any]


def query_cache(
    dataset: Annotated[str, typer.Option(help="squad:FILE or musique:FILE.")],
    count: Annotated[int, typer.Option(min=1, help="Questions drawn from the dataset.")] = 131,
    wordings: Annotated[int, typer.Option(min=1, max=10, help="Of each question of the dataset.")] = 4,
    vectors: Annotated[int, typer.Option(min=0, help="Fill the index up to these with noisy copies.")] = 0,
    index: Annotated[str, typer.Option(help="faiss-flat or faiss-hnsw.")] = "faiss-flat",
    capacities: Annotated[
        str | None, typer.Option(help="With commas; default: a tenth, half, all of the questions.")
    ] = None,
    tolerances: Annotated[str, typer.Option(help="Cosine distances, with commas.")] = "0,0.02,0.05,0.1",
    guard: Annotated[bool, typer.Option(help="Refuse hits on questions that only look alike.")] = True,
    reorder: Annotated[bool, typer.Option(help="Order candidates anew for each question.")] = True,
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: Plot = None,
) -> None:
    """Hit rates, search time saved and recall of the query cache, over a dataset."""
    sizes = tuple(int(size) for size in opt.numbers("--capacities", capacities or ""))
    sweep = Sweep(sizes, opt.numbers("--tolerances", tolerances), guard, reorder)
    quiet_loading()
    asked = of_dataset(dataset, count, wordings=wordings, vectors=vectors, seed=seed, progress=True)
    report = run(asked, sweep, index, progress=True)
    show(report.part(SWEEP).table(f"Hit rate and recall: {report.model}"))
    written(report, json, plot, draw)


@dataclass(frozen=True)
class Sweep:
    """What is varied: every capacity with every tolerance (cosine distance).

    Without ``capacities`` they are a tenth, half and all of the different questions. With ``reorder``, as
    over an index of the retriever's own, a hit puts the cached question's candidates in order for its own;
    else it returns the cached list (the paper).
    """

    capacities: tuple[int, ...] = ()
    tolerances: tuple[float, ...] = TOLERANCES
    guard: bool = True
    reorder: bool = True

    def cases(self, distinct: int) -> list[tuple[int, float]]:
        """Capacity and tolerance of every replay."""
        sizes = {max(1, distinct // 10), max(1, distinct // 2), distinct}
        return list(product(self.capacities or sorted(sizes), self.tolerances))


@dataclass(frozen=True)
class Searched:
    """The index's own answer to each question of a workload, and the milliseconds it took.

    ``candidates`` are the results and the next ones.
    """

    candidates: tuple[tuple[int, ...], ...]
    ms: tuple[float, ...]

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """The results."""
        return tuple(found[:RESULTS] for found in self.candidates)


def run(workload: Workload, sweep: Sweep, index: str = "faiss-flat", progress: bool = False) -> BenchReport:
    """Replay a workload over an index; rows of the part ``sweep`` as of :func:`replays`."""
    built = open_index(index, workload.chunks.shape[1])
    built.add(range(len(workload.chunks)), workload.chunks)
    count = FACTOR * RESULTS if sweep.reorder else RESULTS
    found = searched(workload, lambda question: built.search(question, count).ids, progress)
    cases = replays(workload, found, sweep, progress)
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


def replays(workload: Workload, found: Searched, sweep: Sweep, progress: bool = False) -> Iterator[Row]:
    """One row per capacity and tolerance; embedding the questions is in no figure.

    A miss costs its lookup, its insert and the time that its own search took without a cache.
    ``latency_saved`` is the share of all search time; ``result_recall`` the mean share of the index's own
    results that are returned. ``wrong_hits`` are hits on another question's entry, as a share of all
    lookups. ``evidence`` is the share of lookups that return a chunk with the answer.
    """
    cases = sweep.cases(len(set(workload.distinct)))
    for capacity, tolerance in tqdm(cases, "replay", unit="case", disable=not progress):
        yield _replay(workload, found, sweep, capacity, tolerance)


def _replay(workload: Workload, found: Searched, sweep: Sweep, capacity: int, tolerance: float) -> Row:
    cache = ProximityCache(capacity, tolerance, "cosine")
    retrieval: CachedRetrieval[int] = CachedRetrieval(cache, guard=sweep.guard)
    results = found.ids
    lookups_us, latency_ms, recall, wrong, evidence = list[float](), 0.0, 0.0, 0, 0
    for at in range(len(workload.texts)):
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
        right = set(results[at])
        recall += len(right.intersection(ids)) / len(right) if right else 1.0
        wrong += workload.distinct[maker] != workload.distinct[at]
        evidence += bool(workload.evidence[at].intersection(ids))
    n, stats = len(lookups_us), retrieval.stats()
    uncached = sum(found.ms)
    own = [bool(chunks.intersection(ids)) for chunks, ids in zip(workload.evidence, results, strict=True)]
    return {
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
        "evidence": evidence / n,
        "evidence_uncached": statistics.fmean(own),
    }


def _reordered(candidates: tuple[int, ...], workload: Workload, at: int) -> tuple[int, ...]:
    """The nearest candidates to a question."""
    similar = workload.chunks[list(candidates)] @ workload.questions[at]
    return tuple(candidates[place] for place in np.argsort(-similar, kind="stable")[:RESULTS])


def draw(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw a heat map per figure that the report has, over capacity and tolerance (Proximity, figure 3)."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = report.part(SWEEP).rows
    capacities = sorted({row["capacity"] for row in rows})
    tolerances = sorted({row["tolerance"] for row in rows})
    figure = Figure(figsize=(3.6 * len(PANELS), 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        cells = {(row["tolerance"], row["capacity"]): row[name] for row in rows}
        values = np.array([[cells[tolerance, size] for size in capacities] for tolerance in tolerances])
        axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        for (y, x), value in np.ndenumerate(values):
            colour = "white" if value < 0.6 else "black"
            axes.text(x, y, f"{value:.0%}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(len(capacities)), [str(size) for size in capacities])
        axes.set_yticks(range(len(tolerances)), [f"{tolerance:g}" for tolerance in tolerances])
        axes.set_xlabel("capacity (entries)")
        axes.set_title(PANELS[name], fontsize=10)
    figure.axes[0].set_ylabel("tolerance (cosine distance)")
    figure.suptitle(report.model, fontsize=9)
    figure.savefig(path, dpi=150)
