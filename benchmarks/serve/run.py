"""``python -m benchmarks serve``: many requests at once, beside transformers' own batching."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from benchmarks.serve.replay import check_same, figures, replay, same_answers
from benchmarks.serve.systems import ContinuousBatching, Engine, Sequential, System
from benchmarks.serve.workload import Ids, ServeRequest, random_documents, text_documents
from benchmarks.shapes import dtype_named, random_model
from ragcachekit import QueueConfig, RagCache, StoreConfig, TreeConfig
from ragcachekit.commands.report import BenchReport
from ragcachekit.model.kv import KVLayout
from ragcachekit.model.loading import load_model
from ragcachekit.policies.registry import open_policy

SEQUENTIAL, BATCHING, SHARING = BASELINES = ("sequential", "batching", "sharing")
EXACT = (*BASELINES, "full", "prefix")
ORDERS = {"cache-aware": QueueConfig().window, "fifo": 0}
LOADS = (0.5, 1.0, 2.0)
"""Rates by default, in multiples of what :data:`SEQUENTIAL` answers."""
PATIENCE = 5.0
"""Deadline of a first token by default, over that of :data:`SEQUENTIAL` alone (RAGCache, section 7)."""
SHAPE = "smollm2-135m"

COLUMNS = (
    *("system", "order", "rate", "ttft_ms", "ttft_ms_p50", "ttft_ms_p99", "tbt_ms_p50", "tbt_ms_p99"),
    *("throughput", "speedup", "goodput", "hit_rate", "refused", "same"),
)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What is served, and how.

    ``model`` is a folder, a hub id or ``sample``, else ``shape`` has random weights. Documents are cut from
    ``dataset`` or ``corpus``, else random tokens. ``systems`` are :data:`BASELINES` and policies of ours,
    each under every one of ``orders``. ``budget`` is that of the chunk KV, as a multiple of the KV of all
    documents. ``rates`` are requests per second, by default (None) :data:`LOADS`; all at once comes first.
    ``deadline`` is in seconds to the first token. ValueError for unknown names
    and what does not fit together.
    """

    shape: str | None = None
    model: str | None = None
    dataset: str | None = None
    corpus: str | os.PathLike[str] | None = None
    systems: tuple[str, ...] = (*BASELINES, "full", "prefix", "auto")
    orders: tuple[str, ...] = ("cache-aware",)
    budget: float = 4.0
    rates: tuple[float, ...] | None = None
    requests: int = 24
    documents: int = 64
    chunks: int = 5
    chunk_tokens: int = 190
    max_new_tokens: int = 32
    alpha: float = 1.0
    warm_up: int = 8
    max_batch: int = 16
    max_waiting: int = 256
    deadline: float | None = None
    runs: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape is not None and self.model is not None:
            raise ValueError("give a shape (random weights) or a model, not both")
        if self.model is None and (self.dataset or self.corpus):
            raise ValueError("a dataset or a corpus needs the tokenizer of a model; random weights have none")
        if self.chunks > self.documents:
            raise ValueError(f"a prompt has {self.chunks} documents, and there are {self.documents} in all")
        if not self.orders or not set(self.orders) <= set(ORDERS):
            raise ValueError(f"unknown order in {self.orders}; known: {', '.join(ORDERS)}")
        for system in self.systems:
            if system not in BASELINES:
                open_policy(system)
        dtype_named(self.dtype)

    @property
    def compared(self) -> bool:
        """Whether ``sequential`` is measured: it gives the rates, or checks an exact system."""
        return self.rates is None or not set(EXACT).isdisjoint(self.systems)

    @property
    def variants(self) -> list[tuple[str, str]]:
        """Systems and orders as they are measured; baselines have no order of ours."""
        named = [system for system in dict.fromkeys(self.systems) if system != SEQUENTIAL]
        ours = [(s, o) for s in named for o in (("",) if s in BASELINES else self.orders)]
        return [(SEQUENTIAL, ""), *ours]


def run(settings: ServeSettings, progress: bool = False) -> BenchReport:
    """Measure every system; rows of one system at one rate each, columns as of :func:`.replay.figures`.

    ``rate`` is in requests per second, None where all come at once: there ``throughput`` is the system's
    greatest, and ``speedup`` that over ``sequential``. ``same`` is the share of the answers that have the
    tokens of ``sequential``. RagCacheError if an exact system answers otherwise: no figure is given then.
    Both are None where ``sequential`` is not measured.
    """
    bench = _Bench(settings)
    rows: list[dict[str, Any]] = []
    for system, order in tqdm(settings.variants, unit="system", disable=not progress):
        rows += bench.measured(system, order)
    return BenchReport("serve", bench.name, settings.seed, tuple(rows))


class _Bench:
    """Two models of equal weights, one plain and one for our engines, and what was found so far."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._plain, tokenizer = self._loaded()
        self._ours, self._tokenizer = self._loaded()
        size = settings.documents, settings.chunk_tokens
        if settings.dataset or settings.corpus:
            self._documents = text_documents(
                tokenizer, *size, dataset=settings.dataset, corpus=settings.corpus
            )
        else:
            vocab = self._plain.config.get_text_config().vocab_size
            self._documents = random_documents(vocab, *size, settings.seed)
        self._answers: dict[tuple[int, int], list[Ids]] = {}
        self._throughputs: dict[int, float] = {}
        self._rates, self._deadline = settings.rates, settings.deadline
        used = settings.model or f"{settings.shape or SHAPE} shape, random weights, {settings.dtype}"
        self.name = (
            f"{used}; {settings.documents} documents of {settings.chunk_tokens} tokens "
            f"({self._documents.name}), {settings.chunks} per prompt, Zipf {settings.alpha:g}, "
            f"KV budget {settings.budget:g} of them, {settings.max_new_tokens} new tokens"
        )

    def measured(self, name: str, order: str) -> Iterator[dict[str, Any]]:
        """Rows of one system: all at once, then every rate; all that as often as there are runs."""
        warm_up = self._requests(self._settings.warm_up, (0,))
        with (
            tempfile.TemporaryDirectory(prefix="ragcachekit-bench-") as folder,
            closing(self._opened(name, order, folder)) as system,
        ):
            system.warm_up(warm_up)
            if self._deadline is None:
                alone = figures(replay(system, warm_up[:1], None), None)
                self._deadline = PATIENCE * alone["ttft_ms"] / 1e3
            if name == SEQUENTIAL and not self._settings.compared:
                return
            for number in range(self._settings.runs):
                first = self._row(name, order, system, number, 0, None)
                if name == SEQUENTIAL:
                    self._throughputs[number] = first["throughput"]
                if number in self._throughputs:
                    first["speedup"] = first["throughput"] / self._throughputs[number]
                yield first
                if self._rates is None:
                    self._rates = tuple(round(load * first["throughput"], 4) for load in LOADS)
                for place, rate in enumerate(self._rates, 1):
                    yield self._row(name, order, system, number, place, rate)

    def _row(
        self, name: str, order: str, system: System, run: int, place: int, rate: float | None
    ) -> dict[str, Any]:
        served = replay(system, self._requests(self._settings.requests, (1, run, place)), rate)
        if name == SEQUENTIAL:
            self._answers[run, place] = [one.token_ids for one in served]
        expected = self._answers.get((run, place))
        if expected is not None and name in EXACT:
            check_same(self._plain, expected, served, name)
        same = None if expected is None else same_answers(expected, served)
        row = {"system": name, "order": order, "rate": rate, "run": run}
        return {**row, **figures(served, self._deadline), "same": same, "speedup": None}

    def _requests(self, count: int, seed: Sequence[int]) -> tuple[ServeRequest, ...]:
        settings = self._settings
        return self._documents.requests(count, settings.chunks, settings.alpha, (settings.seed, *seed))

    def _opened(self, name: str, order: str, folder: str) -> System:
        settings, tokens = self._settings, self._settings.documents * self._settings.chunk_tokens
        if name == SEQUENTIAL:
            return Sequential(self._plain, settings.max_new_tokens)
        if name in BASELINES:
            prompt = max(len(request.token_ids) for request in self._requests(settings.warm_up, (0,)))
            return ContinuousBatching(
                self._plain,
                settings.max_new_tokens,
                max_batch=settings.max_batch,
                request_tokens=prompt + settings.max_new_tokens,
                shared_tokens=tokens if name == SHARING else 0,
            )
        budget = int(settings.budget * tokens * KVLayout.of(self._ours).token_bytes)
        rag = RagCache(
            self._ours,
            self._tokenizer,
            policy=name,
            encoder="standalone",
            store=StoreConfig(host_bytes=budget),
            tree=TreeConfig(host_bytes=budget) if name == "prefix" else None,
            namespace="bench",
            encode_after=1,
            cache_dir=folder,
            queue=QueueConfig(
                max_batch=settings.max_batch, max_waiting=settings.max_waiting, window=ORDERS[order]
            ),
        )
        return Engine(rag, settings.max_new_tokens, list(self._documents.each_once(settings.chunks)))

    def _loaded(self) -> tuple[Any, Any]:
        settings = self._settings
        if settings.model is None:
            shape = settings.shape or SHAPE
            model, tokenizer = random_model(shape, dtype=settings.dtype, device=settings.device), None
        else:
            dtype = dtype_named(settings.dtype)
            model, tokenizer = load_model(settings.model, settings.device, dtype=dtype)
        model.generation_config.eos_token_id = None  # all answers have the same length
        return model, tokenizer


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw first-token times over the rate, and the answers per second when all requests come at once.

    Solid lines are medians, dashed ones 99th percentiles, means of the runs (RAGCache, fig. 15; Cache-Craft,
    fig. 22).
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    groups = defaultdict[str, dict[float | None, list[dict[str, Any]]]](lambda: defaultdict(list))
    for row in report.rows:
        groups[", ".join(filter(None, (row["system"], row["order"])))][row["rate"]].append(row)

    def mean(rows: list[dict[str, Any]], name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    times, answers = figure.subplots(1, 2)
    for name, rates in groups.items():
        if at := sorted(rate for rate in rates if rate is not None):
            (line,) = times.plot(at, [mean(rates[rate], "ttft_ms_p50") for rate in at], "o-", label=name)
            p99 = [mean(rates[rate], "ttft_ms_p99") for rate in at]
            times.plot(at, p99, linestyle="--", color=line.get_color(), linewidth=1)
    times.set(xlabel="requests per second", ylabel="time to first token (ms)", yscale="log")
    times.legend(fontsize=8, title="median; dashed: 99th percentile", title_fontsize=8)
    greatest = {name: mean(rates[None], "throughput") for name, rates in groups.items() if None in rates}
    bars = answers.barh(list(greatest), list(greatest.values()))
    first = next(iter(greatest.values()))
    answers.bar_label(bars, [f"{value / first:.1f}x" for value in greatest.values()], padding=3)
    answers.margins(x=0.12)
    answers.invert_yaxis()
    answers.set_xlabel("answers per second, all requests at once")
    figure.suptitle(report.model, fontsize=9)
    figure.savefig(path, dpi=150)
