"""Metrics of requests, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragcachekit.errors import missing_extra

if TYPE_CHECKING:
    from ragcachekit.telemetry.prometheus import PrometheusObserver

__all__ = ["PrometheusObserver"]


def __getattr__(name: str) -> Any:
    if name != "PrometheusObserver":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from ragcachekit.telemetry.prometheus import PrometheusObserver
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        install = missing_extra("prometheus", "prometheus-client")
        raise ModuleNotFoundError(f"{name} needs prometheus_client: {install}", name=error.name) from error
    return PrometheusObserver
