"""Prometheus metrics of one engine, counted in tokens."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import ragcachekit
from ragcachekit.errors import RagCacheError
from ragcachekit.observers import Observer, QueryLookup, model_name
from ragcachekit.reports import GenerateReport

if TYPE_CHECKING:
    from ragcachekit.engine.rag_cache import RagCache

_Collector = TypeVar("_Collector", bound=Collector)
_GAUGES = {"nbytes": "bytes", "budget": "budget_bytes", "entries": "entries", "writable": "writable"}
_COUNTERS = ("hits", "misses", "evictions", "damaged", "failed_writes", "failures")
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class PrometheusObserver(Observer):
    """Counts an engine's requests; adds itself to the engine's observers.

    Tokens of a prompt are counted once its first token was generated, by ``source``: ``exact`` and
    ``approximate`` were reused, ``recomputed`` were cached and computed by choice of the policy, and
    ``computed`` were not cached. Seconds have the same limit. Tiers, queue and encoder are read at each
    scrape. The metrics are listed in docs/observability.md.

    Parameters
    ----------
    rag : RagCache
    registry : prometheus_client.CollectorRegistry, optional
        Default is a new one, with the metrics of this process. A registry takes one engine at a time.
    namespaces : bool
        Whether token counters have the label ``namespace``; each namespace adds five time series.

    Raises
    ------
    ValueError
        If the registry has an engine's metrics already.

    Examples
    --------
    >>> metrics = PrometheusObserver(rag)                          # doctest: +SKIP
    >>> body, content_type = metrics.render()                      # doctest: +SKIP
    """

    def __init__(
        self, rag: RagCache, registry: CollectorRegistry | None = None, *, namespaces: bool = False
    ) -> None:
        self.registry, self._rag, self._namespaces = registry or CollectorRegistry(), rag, namespaces
        if registry is None:
            ProcessCollector(registry=self.registry)
        self._collectors: list[Collector] = []
        tenant = ("namespace",) if namespaces else ()
        self._prompt = self._counter("prompt_tokens", "Prompt tokens by how they came", (*tenant, "source"))
        self._output = self._counter("output_tokens", "Generated tokens", tenant)
        self._requests = self._counter("requests", "Requests by finish reason or error", ("outcome",))
        self._fallbacks = self._counter("fallbacks", "Prompts prefilled in full instead of linked")
        self._retries = self._counter("retries", "Prompts planned again, or in full, after a failure")
        self._loaded = self._counter("loaded_bytes", "Bytes that requests read from slow tiers")
        self._ttft = self._seconds("ttft_seconds", "From the call to the first token", _LONG)
        self._total = self._seconds("request_seconds", "From the call to the last token", _LONG)
        self._queue = self._seconds("queue_seconds", "From the call to the turn in the queue", _LONG)
        self._link = self._seconds("link_seconds", "Assembly of the linked cache with its waits", _SHORT)
        self._wait = self._seconds("load_wait_seconds", "Waits for slow tiers", _SHORT)
        self._per_token = self._seconds("time_per_output_token_seconds", "After the first token", _SHORT)
        self._lookups = self._counter("query_cache_lookups", "Query cache lookups", ("result",))
        self._search = self._seconds("search_seconds", "Searches after lookups without a hit", _SHORT)
        self._register(EngineState(rag))
        rag.add_observer(self)

    def render(self) -> tuple[bytes, str]:
        """All metrics as Prometheus' text, and its content type."""
        return exposition.generate_latest(self.registry), exposition.CONTENT_TYPE_LATEST

    def close(self) -> None:
        """Leave the engine and the registry; idempotent."""
        self._rag.remove_observer(self)
        while self._collectors:
            self.registry.unregister(self._collectors.pop())

    def request_ended(
        self, token: object, report: GenerateReport | None, error: BaseException | None
    ) -> None:
        """Count a request."""
        if report is None:
            self._requests.labels(type(error).__name__).inc()
            return
        self._requests.labels(report.finish_reason).inc()
        if not report.output_tokens:  # cancelled before its first token
            return
        link = report.link
        tenant = (link.namespace,) if self._namespaces else ()
        for source in ("exact", "approximate", "recomputed", "computed"):
            self._prompt.labels(*tenant, source).inc(getattr(link, f"{source}_tokens"))
        (self._output.labels(*tenant) if tenant else self._output).inc(report.output_tokens)
        self._fallbacks.inc(link.fallback is not None)
        self._retries.inc(link.retries)
        self._loaded.inc(link.loaded_bytes)
        self._ttft.observe(report.ttft_ms / 1e3)
        self._total.observe(report.total_ms / 1e3)
        self._link.observe(link.link_ms / 1e3)
        self._wait.observe(link.wait_ms / 1e3)
        if report.batch:
            self._queue.observe(report.queue_ms / 1e3)
        if report.output_tokens > 1:
            decoding = report.total_ms - report.ttft_ms
            self._per_token.observe(decoding / 1e3 / (report.output_tokens - 1))

    def looked_up(self, lookup: QueryLookup) -> None:
        """Count a lookup."""
        self._lookups.labels(lookup.result).inc()

    def searched(self, lookup: QueryLookup) -> None:
        """Observe a search."""
        self._search.observe(lookup.search_seconds or 0.0)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return self._register(Counter(f"ragcachekit_{name}", f"{text}.", labels, registry=None))

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._register(
            Histogram(f"ragcachekit_{name}", f"{text}, in seconds.", buckets=buckets, registry=None)
        )

    def _register(self, collector: _Collector) -> _Collector:
        try:
            self.registry.register(collector)
        except ValueError:
            while self._collectors:
                self.registry.unregister(self._collectors.pop())
            raise ValueError(
                "the registry has an engine's metrics already; give each engine its own CollectorRegistry"
            ) from None
        self._collectors.append(collector)
        return collector


class EngineState(Collector):
    """The collector of one engine, which is referenced weakly; yields nothing once that is closed."""

    def __init__(self, rag: RagCache) -> None:
        self._rag = weakref.ref(rag)
        device = str(rag.model.device)
        self._build = (ragcachekit.__version__, model_name(rag.model), rag.fingerprint[:12], device)

    def describe(self) -> Iterable[Metric]:
        """The families' names, for the registry's check of duplicates."""
        return [GaugeMetricFamily("ragcachekit_build_info", "")]

    def collect(self) -> Iterator[Metric]:
        """The engine's state now."""
        rag = self._rag()
        if rag is None:
            return
        labels = ("version", "model", "fingerprint", "device")
        build = GaugeMetricFamily(
            "ragcachekit_build_info", "Always 1; what runs is in the labels.", labels=labels
        )
        build.add_metric(self._build, 1)
        yield build
        try:
            families = [*_tiers(rag), *_queue(rag), *_background(rag)]
        except RagCacheError:  # closed, or a tier is lost
            return
        yield from families


def _tiers(rag: RagCache) -> Iterator[Metric]:
    tiers = rag.stats()
    for field, name in (*_GAUGES.items(), *((name, name) for name in _COUNTERS)):
        kind = GaugeMetricFamily if field in _GAUGES else CounterMetricFamily
        values = {tier.tier: getattr(tier, field) for tier in tiers}
        yield _family(kind, f"tier_{name}", f"{name} of a storage tier.", "tier", values)


def _queue(rag: RagCache) -> Iterator[Metric]:
    stats = rag.queue.stats()
    text = "Requests before their turn, and in the batch."
    states = {"waiting": stats.waiting, "running": stats.running}
    yield _family(GaugeMetricFamily, "queue_requests", text, "state", states)
    yield CounterMetricFamily("ragcachekit_decode_steps", "Decoding steps of the queue.", stats.steps)
    decoded = round(stats.steps * stats.mean_batch)
    yield CounterMetricFamily("ragcachekit_batched_tokens", "Tokens decoded in these steps.", decoded)


def _background(rag: RagCache) -> Iterator[Metric]:
    encoding, shadow = rag.encoding_stats(), rag.shadow_report()
    events = ("missed", "captured", "encoded")
    tokens = {event: getattr(encoding, f"{event}_tokens") for event in events}
    text = "Chunk tokens missed, captured and encoded."
    yield _family(CounterMetricFamily, "chunk_tokens", text, "event", tokens)
    if shadow.agreement is not None:
        text = "Share of answer tokens as in full."
        yield GaugeMetricFamily("ragcachekit_shadow_agreement", text, shadow.agreement)
    text = "1 while prompts are computed in full."
    yield GaugeMetricFamily("ragcachekit_shadow_falling_back", text, shadow.falling_back)


def _family(kind: Any, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family: Metric = kind(f"ragcachekit_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)  # type: ignore[attr-defined]
    return family
