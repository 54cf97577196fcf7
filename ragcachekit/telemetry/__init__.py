"""Metrics and traces of requests, for Prometheus and OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragcachekit.errors import missing_extra

if TYPE_CHECKING:
    from ragcachekit.telemetry.opentelemetry import OpenTelemetryObserver
    from ragcachekit.telemetry.prometheus import PrometheusObserver

__all__ = ["OpenTelemetryObserver", "PrometheusObserver"]


def __getattr__(name: str) -> Any:
    try:
        if name == "PrometheusObserver":
            from ragcachekit.telemetry.prometheus import PrometheusObserver

            return PrometheusObserver
        if name == "OpenTelemetryObserver":
            from ragcachekit.telemetry.opentelemetry import OpenTelemetryObserver

            return OpenTelemetryObserver
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "prometheus_client":
            install = missing_extra("prometheus", "prometheus-client")
        elif missing == "opentelemetry":
            install = missing_extra("opentelemetry", "opentelemetry-api")
        else:
            raise
        raise ModuleNotFoundError(f"{name} needs {missing}: {install}", name=error.name) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
