"""The serving bench: every system at every rate, beside a check that exact systems answer alike."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from tqdm.auto import tqdm

from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.bench.serve.replay import Row, check_same, figures, replay, same_answers
from ragcachekit.commands.bench.serve.settings import (
    BASELINES,
    CACHES,
    EXACT,
    LOADS,
    ORDERS,
    PATIENCE,
    SEQUENTIAL,
    SHAPE,
    SHARING,
    ServeSettings,
    Variant,
    variants,
)
from ragcachekit.commands.bench.serve.systems import ContinuousBatching, Engine, Sequential, System
from ragcachekit.commands.bench.serve.workload import (
    Documents,
    Ids,
    ServeRequest,
    random_documents,
    text_documents,
)
from ragcachekit.commands.bench.shapes import describe, dtype_named, random_model
from ragcachekit.commands.sample_model import resolve_model
from ragcachekit.config import QueueConfig, StoreConfig, TreeConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.model.layout import KVLayout
from ragcachekit.model.pretrained import load_model


def run(settings: ServeSettings, progress: bool = False) -> BenchReport:
    """Measure every system; rows of one system at one rate each, columns as of :func:`.replay.figures`.

    ``rate`` is in requests per second, None where all come at once: there ``throughput`` is the system's
    greatest, and ``speedup`` that over ``sequential``. ``same`` is the share of the answers that have the
    tokens of ``sequential``. RagCacheError if an exact system answers otherwise: no figure is given then.
    Both are None where ``sequential`` is not measured.
    """
    bench, asked = _Bench(settings), list(variants(settings))
    with tqdm(unit="request", disable=not progress) as bar:
        rates = LOADS if settings.rates is None else settings.rates
        replays = (len(asked) - (not settings.compared)) * settings.runs * (1 + len(rates))
        bar.total = replays * settings.requests
        rows = [row for variant in asked for row in bench.measured(variant, bar)]
    return BenchReport("serve", bench.name, settings.seed, tuple(rows))


class _Bench:
    """Two models of equal weights, one plain and one for our engines, and what was found so far."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._plain, tokenizer = self._loaded()
        self._ours, self._tokenizer = self._loaded()
        self._documents = self._made(tokenizer)
        self._answers: dict[tuple[int, int], list[Ids]] = {}
        self._throughputs: dict[int, float] = {}
        self._rates, self._deadline = settings.rates, settings.deadline
        used = settings.model or describe(settings.shape or SHAPE, settings.dtype)
        self.name = (
            f"{used}; {len(self._documents.chunks)} documents of {settings.chunk_tokens} tokens "
            f"({self._documents.name}), {settings.chunks} per prompt, Zipf {settings.alpha:g}, "
            f"{settings.new_tokens} new tokens"
        )

    def measured(self, variant: Variant, bar: tqdm[Any]) -> Iterator[Row]:
        """Rows of one variant: all at once, then every rate; all that as often as there are runs."""
        bar.set_description(f"{variant}: warm-up")
        warm_up = self._requests(self._settings.warm_up, (0,))
        with (
            tempfile.TemporaryDirectory(prefix="ragcachekit-bench-") as folder,
            closing(self._opened(variant, folder)) as system,
        ):
            system.warm_up(warm_up)
            if self._deadline is None:
                alone = figures(replay(system, warm_up[:1], None), None)
                self._deadline = PATIENCE * alone["ttft_ms"] / 1e3
            if variant.system == SEQUENTIAL and not self._settings.compared:
                return
            bar.set_description(str(variant))
            for number in range(self._settings.runs):
                yield from self._run(variant, system, number, bar)

    def _run(self, variant: Variant, system: System, number: int, bar: tqdm[Any]) -> Iterator[Row]:
        first = self._row(variant, system, number, 0, None, bar)
        if variant.system == SEQUENTIAL:
            self._throughputs[number] = first["throughput"]
        if number in self._throughputs:
            first["speedup"] = first["throughput"] / self._throughputs[number]
        yield first
        if self._rates is None:
            self._rates = tuple(round(load * first["throughput"], 4) for load in LOADS)
        for place, rate in enumerate(self._rates, 1):
            yield self._row(variant, system, number, place, rate, bar)

    def _row(
        self, variant: Variant, system: System, run: int, place: int, rate: float | None, bar: tqdm[Any]
    ) -> Row:
        requests = self._requests(self._settings.requests, (1, run, place))
        served = replay(system, requests, rate, bar)
        if variant.system == SEQUENTIAL:
            self._answers[run, place] = [one.token_ids for one in served]
        expected = self._answers.get((run, place))
        if expected is not None and variant.system in EXACT:
            check_same(self._plain, expected, served, str(variant))
        row = {"system": variant.system, "cache": variant.cache, "order": variant.order, "rate": rate}
        found = {**row, "run": run, **figures(served, self._deadline)}
        same = None if expected is None else same_answers(expected, served)
        return {**found, "same": same, "speedup": None}

    def _requests(self, count: int, seed: Sequence[int]) -> tuple[ServeRequest, ...]:
        settings = self._settings
        return self._documents.requests(count, settings.chunks, settings.alpha, (settings.seed, *seed))

    def _opened(self, variant: Variant, folder: str) -> System:
        settings, documents = self._settings, self._documents
        if variant.system == SEQUENTIAL:
            return Sequential(self._plain, settings.new_tokens)
        prompt = max(len(request.token_ids) for request in self._requests(settings.warm_up, (0,)))
        if variant.system in BASELINES:
            shared = len(documents.chunks) * settings.chunk_tokens if variant.system == SHARING else 0
            tokens = prompt + settings.new_tokens
            sizes = {"max_batch": settings.max_batch, "request_tokens": tokens, "shared_tokens": shared}
            return ContinuousBatching(self._plain, settings.new_tokens, **sizes)
        tokens = len(documents.chunks) * settings.chunk_tokens
        budget = int(CACHES[variant.cache] * tokens * KVLayout.of(self._ours).token_bytes)
        rag = RagCache(
            self._ours,
            self._tokenizer,
            policy=variant.system,
            store=StoreConfig(host_bytes=budget),
            tree=TreeConfig(host_bytes=budget) if variant.system == "prefix" else None,
            namespace="bench",
            encode_after=1,
            cache_dir=folder,
            queue=QueueConfig(
                max_batch=settings.max_batch,
                max_waiting=settings.max_waiting,
                window=ORDERS[variant.order],
            ),
        )
        return Engine(variant.system, rag, settings.new_tokens, list(documents.each_once(settings.chunks)))

    def _loaded(self) -> tuple[Any, Any]:
        settings = self._settings
        if settings.model is None:
            shape = settings.shape or SHAPE
            model, tokenizer = random_model(shape, dtype=settings.dtype, device=settings.device), None
        else:
            dtype = dtype_named(settings.dtype)
            model, tokenizer = load_model(resolve_model(settings.model), settings.device, dtype=dtype)
        model.generation_config.eos_token_id = None  # all answers have the same length
        return model, tokenizer

    def _made(self, tokenizer: Any) -> Documents:
        settings = self._settings
        if settings.dataset or settings.corpus:
            sizes = settings.documents, settings.chunk_tokens
            return text_documents(tokenizer, *sizes, dataset=settings.dataset, corpus=settings.corpus)
        vocab = self._plain.config.get_text_config().vocab_size
        return random_documents(vocab, settings.documents, settings.chunk_tokens, settings.seed)
