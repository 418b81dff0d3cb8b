"""Traces as OpenTelemetry's, over OTLP/HTTP; the one place that knows its packages. Its own variables configure it."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_QUIET = "/healthz,/readyz,/metrics"


class OtelTraces:
    """Sends spans in the background. A collector that does not answer holds nobody up."""

    def __init__(self) -> None:
        named = Resource({SERVICE_NAME: "trainshed"}).merge(OTELResourceDetector().detect())
        # Its own way to end would wait for the collector.
        self._provider = TracerProvider(resource=Resource.create().merge(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("trainshed")

    def instrument(self, app: FastAPI) -> None:
        """Let every request be a span, but for those that machines send every few seconds."""
        FastAPIInstrumentor.instrument_app(
            app,
            tracer_provider=self._provider,
            meter_provider=NoOpMeterProvider(),
            excluded_urls=_QUIET,
            exclude_spans=["receive", "send"],
        )

    @contextmanager
    def span(self, name: str, **attributes: str) -> Iterator[None]:
        """A span from here to its end; those that begin within are its children."""
        with self._tracer.start_as_current_span(name, attributes=attributes):
            yield

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
