"""Tracing with OpenTelemetry, enabled if the environment contains the URL of a collector."""

import pkgutil
from collections.abc import Mapping
from typing import Protocol

import structlog
from fastapi import FastAPI

from service.ports import NoTracer, Tracer
from train_loop.extras import install

log = structlog.get_logger(__name__)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class AppTraces(Tracer, Protocol):
    """Tracer of an app, for its whole lifetime."""

    def instrument(self, app: FastAPI) -> None:
        """Record a span for every request."""

    def close(self) -> None:
        """Send the remaining spans; may hang if the collector does not answer."""


class Off(NoTracer):
    """Tracer that records nothing."""

    def instrument(self, app: FastAPI) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_traces(environment: Mapping[str, str]) -> AppTraces:
    """Return a tracer for the collector in the environment; `Off` without one, or if its packages are missing."""
    if not any(environment.get(name) for name in _ENDPOINTS):
        return Off()
    try:
        opened: AppTraces = pkgutil.resolve_name("service.adapters.otel:OtelTraces")()
    except ImportError as error:
        log.warning("traces_are_off", missing=error.name, remedy=install("opentelemetry"))
        return Off()
    return opened
