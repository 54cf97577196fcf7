"""OpenTelemetry traces and metrics of one engine, by the semantic conventions for generative AI."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace
from opentelemetry.metrics import Histogram
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

import ragcachekit
from ragcachekit.observers import Observer, QueryLookup, RequestStart, model_name
from ragcachekit.reports import GenerateReport

if TYPE_CHECKING:
    from ragcachekit.engine.rag_cache import RagCache

_SOURCES = ("exact", "approximate", "recomputed", "computed")
_DURATION = tuple(0.01 * 2**n for n in range(14))
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**n for n in range(14))
_PER_REQUEST = ("input_tokens", "output_tokens")
_USAGE = (*_PER_REQUEST, "cache_read.input_tokens", "cache_write.input_tokens")
_OPTIONS = {name: name for name in ("max_tokens", "temperature", "top_p", "top_k")} | {
    "max_new_tokens": "max_tokens"
}


class OpenTelemetryObserver(Observer):
    """Traces an engine's requests and searches; adds itself to the engine's observers.

    A request is a span ``chat`` or ``text_completion`` under the caller's current one, with the children
    ``queue``, ``link`` (with ``plan`` and ``load``), ``prefill`` and ``decode``. These follow each other
    without gaps; waits of single layers are summed. A question of a caching retriever is a span
    ``retrieval``. No text of a prompt, question, document or answer is recorded, nor an error's message.

    Parameters
    ----------
    rag : RagCache
    tracer_provider, meter_provider : optional
        Default is OpenTelemetry's global ones; without an SDK they record nothing.
    model : str, optional
        Name of the model in spans; default is its hub id or folder's name.

    Examples
    --------
    >>> OpenTelemetryObserver(rag)                                 # doctest: +SKIP
    """

    def __init__(
        self,
        rag: RagCache,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        *,
        model: str | None = None,
    ) -> None:
        named = "ragcachekit", ragcachekit.__version__
        self._tracer = trace.get_tracer(*named, tracer_provider)
        meter = metrics.get_meter(*named, meter_provider)

        def histogram(name: str, unit: str, boundaries: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(
                f"gen_ai.{name}", unit, explicit_bucket_boundaries_advisory=boundaries
            )

        self._duration = histogram("server.request.duration", "s", _DURATION)
        self._first = histogram("server.time_to_first_token", "s", _FIRST)
        self._next = histogram("server.time_per_output_token", "s", _NEXT)
        inference, token = "client.inference", "{token}"
        self._sizes = {
            name: histogram(f"{inference}.operation.{name}", token, _TOKENS) for name in _PER_REQUEST
        }
        self._usage = {
            name: meter.create_counter(f"gen_ai.{inference}.usage.{name}", token) for name in _USAGE
        }
        self._prompt = meter.create_counter("ragcachekit.prompt.tokens", "{token}")
        self._lookups = meter.create_counter("ragcachekit.query_cache.lookups", "{lookup}")
        self._model, self._rag = model or model_name(rag.model), rag
        rag.add_observer(self)

    def close(self) -> None:
        """Leave the engine; idempotent. Spans of running requests are ended."""
        self._rag.remove_observer(self)

    def request_started(self, start: RequestStart) -> tuple[Span, RequestStart]:
        """Begin a span under the caller's."""
        known = {
            f"gen_ai.request.{name}": start.options[option]
            for option, name in _OPTIONS.items()
            if isinstance(start.options.get(option), int | float)
        }
        attributes = {
            **self._common(start.operation),
            **known,
            "gen_ai.request.stream": start.options.get("streamer") is not None,
            "ragcachekit.namespace": start.namespace,
        }
        name = f"{start.operation} {self._model}"
        span = self._tracer.start_span(
            name, kind=SpanKind.INTERNAL, attributes=attributes, start_time=start.started_ns
        )
        return span, start

    def request_ended(
        self,
        token: tuple[Span, RequestStart] | None,
        report: GenerateReport | None,
        error: BaseException | None,
    ) -> None:
        """End the span, with its children."""
        if token is None:
            return
        span, start = token
        common = self._common(start.operation)
        try:
            if report is None:
                common["error.type"] = type(error).__name__
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))
            else:
                span.set_attributes(_outcome(report, start.options.get("streamer") is not None))
                if span.is_recording():
                    self._children(span, start.started_ns, report)
        finally:
            span.end(None if report is None else start.started_ns + _ns(report.total_ms))
            if report is None:
                self._duration.record((time.time_ns() - start.started_ns) / 1e9, common)
            else:
                self._record(report, common)

    def looked_up(self, lookup: QueryLookup) -> None:
        """Count a lookup; a hit is a span."""
        self._lookups.add(1, {"ragcachekit.query_cache.result": lookup.result})
        if lookup.result == "hit":
            self._retrieval(lookup)

    def searched(self, lookup: QueryLookup) -> None:
        """A lookup and the search after it are a span."""
        self._retrieval(lookup)

    def _record(self, report: GenerateReport, common: dict[str, Any]) -> None:
        """Metrics of an answered request; ``common`` are its attributes."""
        self._duration.record(report.total_ms / 1e3, common)
        if not report.output_tokens:  # cancelled before its first token
            return
        self._first.record(report.ttft_ms / 1e3, common)
        if report.output_tokens > 1:
            decoding = (report.total_ms - report.ttft_ms) / 1e3
            self._next.record(decoding / (report.output_tokens - 1), common)
        for name, tokens in _usage(report).items():
            self._usage[name].add(tokens, {**common, "gen_ai.token.modality": "text"})
            if name in _PER_REQUEST:
                self._sizes[name].record(tokens, common)
        for source in _SOURCES:
            self._prompt.add(
                getattr(report.link, f"{source}_tokens"), {**common, "ragcachekit.source": source}
            )

    def _common(self, operation: str) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "ragcachekit",
            "gen_ai.request.model": self._model,
        }

    def _retrieval(self, lookup: QueryLookup) -> None:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "retrieval",
            "gen_ai.provider.name": "ragcachekit",
            "ragcachekit.query_cache.result": lookup.result,
            "ragcachekit.retrieval.documents": lookup.documents,
        }
        if lookup.distance is not None:
            attributes["ragcachekit.query_cache.distance"] = lookup.distance
        seconds = lookup.lookup_seconds + (lookup.search_seconds or 0.0)
        span = self._tracer.start_span("retrieval", attributes=attributes, start_time=lookup.started_ns)
        span.end(lookup.started_ns + _ns(seconds * 1e3))

    def _children(self, span: Span, start_ns: int, report: GenerateReport) -> None:
        link, turn = report.link, report.queue_ms
        if report.batch or turn:
            self._child(span, "queue", start_ns, 0.0, turn)
        if not report.output_tokens:  # cancelled before its first token
            return
        linked = turn + link.link_ms
        linking = self._child(span, "link", start_ns, turn, linked, end=False)
        self._child(linking, "plan", start_ns, turn, turn + link.plan_ms)
        if link.loaded_bytes:
            load = self._child(linking, "load", start_ns, max(turn, linked - link.wait_ms), linked, end=False)
            load.set_attribute("ragcachekit.load.bytes", link.loaded_bytes)
            load.set_attribute("ragcachekit.load.duration", link.load_ms / 1e3)
            load.end(start_ns + _ns(linked))
        linking.end(start_ns + _ns(linked))
        self._child(span, "prefill", start_ns, linked, report.ttft_ms)
        self._child(span, "decode", start_ns, report.ttft_ms, report.total_ms)

    def _child(
        self, parent: Span, name: str, start_ns: int, start: float, stop: float, end: bool = True
    ) -> Span:
        """A span from ``start`` to ``stop`` milliseconds after ``start_ns``."""
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(name, context=context, start_time=start_ns + _ns(start))
        if end:
            span.end(start_ns + _ns(stop))
        return span


def _usage(report: GenerateReport) -> dict[str, int]:
    link = report.link
    counts = (link.prompt_tokens, report.output_tokens, link.reused_tokens, link.written_tokens)
    return dict(zip(_USAGE, counts, strict=True))


def _outcome(report: GenerateReport, streamed: bool) -> dict[str, Any]:
    link = report.link
    attributes: dict[str, Any] = {
        "gen_ai.response.finish_reasons": (report.finish_reason,),
        **{f"gen_ai.usage.{name}": tokens for name, tokens in _usage(report).items()},
        "ragcachekit.policy": link.policy,
        "ragcachekit.encoder": link.encoder,
        "ragcachekit.chunks": len(link.chunks),
        "ragcachekit.fell_back": link.fallback is not None,
        "ragcachekit.retries": link.retries,
        "ragcachekit.batch": report.batch,
        **{f"ragcachekit.tokens.{source}": getattr(link, f"{source}_tokens") for source in _SOURCES},
    }
    if report.output_tokens:
        attributes["gen_ai.server.time_to_first_token"] = report.ttft_ms / 1e3
        if streamed:
            attributes["gen_ai.response.time_to_first_chunk"] = report.ttft_ms / 1e3
    return attributes


def _ns(milliseconds: float) -> int:
    return int(milliseconds * 1e6)
