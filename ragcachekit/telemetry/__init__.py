"""Metrics and traces of requests, for Prometheus and OpenTelemetry."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ragcachekit.errors import missing_extra

if TYPE_CHECKING:
    from ragcachekit.telemetry.opentelemetry import OpenTelemetryObserver
    from ragcachekit.telemetry.prometheus import PrometheusObserver

__all__ = ["OpenTelemetryObserver", "PrometheusObserver"]


_MODULES = {
    "PrometheusObserver": (
        "prometheus",
        "prometheus_client",
        missing_extra("prometheus", "prometheus-client"),
    ),
    "OpenTelemetryObserver": (
        "opentelemetry",
        "opentelemetry",
        missing_extra("opentelemetry", "opentelemetry-api"),
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package, install = _MODULES[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        why = f"{name} needs {package}: {install}"
        raise ModuleNotFoundError(why, name=error.name) from error
