"""What Prometheus reads from an engine at each scrape: tiers, queue, encoder, shadow mode."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import ragcachekit
from ragcachekit.errors import RagCacheError
from ragcachekit.telemetry.names import model_name

if TYPE_CHECKING:
    from ragcachekit.engine.rag_cache import RagCache

_GAUGES = {"nbytes": "bytes", "budget": "budget_bytes", "entries": "entries", "writable": "writable"}
_COUNTERS = ("hits", "misses", "evictions", "damaged", "failed_writes")


class EngineState(Collector):
    """The collector of one engine, which is referenced weakly; yields nothing once that is closed."""

    def __init__(self, rag: RagCache) -> None:
        self._rag = weakref.ref(rag)
        device = str(rag.model.device)
        self._build = (ragcachekit.__version__, model_name(rag), rag.fingerprint[:12], device)

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
            families = [*_tiers(rag), *_queue(rag), *_work(rag)]
        except RagCacheError:  # closed, or a tier is lost
            return
        yield from families


def _tiers(rag: RagCache) -> Iterator[Metric]:
    tiers = rag.stats()
    for field, name in _GAUGES.items():
        gauge = GaugeMetricFamily(f"ragcachekit_tier_{name}", f"{name} of a storage tier.", labels=["tier"])
        for tier in tiers:
            gauge.add_metric([tier.tier], getattr(tier, field))
        yield gauge
    for field in _COUNTERS:
        counter = CounterMetricFamily(
            f"ragcachekit_tier_{field}", f"{field} of a storage tier.", labels=["tier"]
        )
        for tier in tiers:
            counter.add_metric([tier.tier], getattr(tier, field))
        yield counter


def _queue(rag: RagCache) -> Iterator[Metric]:
    stats = rag.queue.stats()
    gauge = GaugeMetricFamily(
        "ragcachekit_queue_requests", "Requests before their turn, and in the batch.", labels=["state"]
    )
    gauge.add_metric(["waiting"], stats.waiting)
    gauge.add_metric(["running"], stats.running)
    yield gauge
    yield CounterMetricFamily("ragcachekit_decode_steps", "Decoding steps of the queue.", stats.steps)
    decoded = round(stats.steps * stats.mean_batch)
    yield CounterMetricFamily("ragcachekit_batched_tokens", "Tokens decoded in these steps.", decoded)


def _work(rag: RagCache) -> Iterator[Metric]:
    encoding, shadow = rag.encoding_stats(), rag.shadow_report()
    counter = CounterMetricFamily(
        "ragcachekit_chunk_tokens", "Chunk tokens missed, captured and encoded.", labels=["event"]
    )
    for event in ("missed", "captured", "encoded"):
        counter.add_metric([event], getattr(encoding, f"{event}_tokens"))
    yield counter
    if shadow.agreement is not None:
        yield GaugeMetricFamily(
            "ragcachekit_shadow_agreement", "Share of answers as in full.", shadow.agreement
        )
    yield GaugeMetricFamily(
        "ragcachekit_shadow_falling_back", "1 while prompts are computed in full.", shadow.falling_back
    )
