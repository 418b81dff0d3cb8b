"""Whether spans are sent: where the environment names a collector, as OpenTelemetry has it."""

import pkgutil
from collections.abc import Mapping
from typing import Protocol

import structlog
from fastapi import FastAPI

from service.ports import Traces, Untraced

log = structlog.get_logger(__name__)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class AppTraces(Traces, Protocol):
    """Those of an app, from its start to its end."""

    def instrument(self, app: FastAPI) -> None:
        """Let every request be a span."""

    def close(self) -> None:
        """Send what is left; a collector that does not answer may keep it from ending."""


class Off(Untraced):
    """An app without any."""

    def instrument(self, app: FastAPI) -> None:
        """Leave it as it is."""

    def close(self) -> None:
        """There is nothing to send."""


def open_traces(environment: Mapping[str, str]) -> AppTraces:
    """Spans to the collector that is named; none where none is, or where the packages for it are missing."""
    if not any(environment.get(name) for name in _ENDPOINTS):
        return Off()
    try:
        opened: AppTraces = pkgutil.resolve_name("service.adapters.otel:OtelTraces")()
    except ImportError as error:
        log.warning("traces_are_off", missing=error.name, remedy="pip install 'trainshed[otel]'")
        return Off()
    return opened
