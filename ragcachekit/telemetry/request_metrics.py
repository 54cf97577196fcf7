"""OpenTelemetry's metrics of requests, with the names and boundaries of its conventions."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.metrics import Histogram, Meter

from ragcachekit.reports import GenerateReport

_DURATION = tuple(0.01 * 2**n for n in range(14))
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**n for n in range(14))


class RequestMetrics:
    """Instruments of one meter."""

    def __init__(self, meter: Meter) -> None:
        def seconds(name: str, boundaries: tuple[float, ...]) -> Histogram:
            name = f"gen_ai.server.{name}"
            return meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=boundaries)

        self._duration = seconds("request.duration", _DURATION)
        self._first = seconds("time_to_first_token", _FIRST)
        self._next = seconds("time_per_output_token", _NEXT)
        self._usage = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", explicit_bucket_boundaries_advisory=_TOKENS
        )
        self._prompt = meter.create_counter("ragcachekit.prompt.tokens", "{token}")
        self.lookups = meter.create_counter("ragcachekit.query_cache.lookups", "{lookup}")

    def record(self, report: GenerateReport | None, common: dict[str, Any], started_ns: int) -> None:
        """Record a request that has ended; ``common`` are its attributes."""
        if report is None:
            self._duration.record((time.time_ns() - started_ns) / 1e9, common)
            return
        self._duration.record(report.total_ms / 1e3, common)
        if not report.output_tokens:  # cancelled before its first token
            return
        link = report.link
        self._first.record(report.ttft_ms / 1e3, common)
        if report.output_tokens > 1:
            decoding = (report.total_ms - report.ttft_ms) / 1e3
            self._next.record(decoding / (report.output_tokens - 1), common)
        self._usage.record(link.prompt_tokens, {**common, "gen_ai.token.type": "input"})
        self._usage.record(report.output_tokens, {**common, "gen_ai.token.type": "output"})
        for source in ("exact", "approximate", "recomputed", "computed"):
            attributes = {**common, "ragcachekit.source": source}
            self._prompt.add(getattr(link, f"{source}_tokens"), attributes)
