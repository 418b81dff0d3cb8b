"""OpenTelemetry traces over OTLP/HTTP. Only this module imports its packages. The OTEL_* variables configure it."""

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
    """A Traces that sends spans in the background. A collector that does not answer delays no request."""

    def __init__(self) -> None:
        named = Resource({SERVICE_NAME: "trainshed"}).merge(OTELResourceDetector().detect())
        # The SDK's exit handler would wait for the collector.
        self._provider = TracerProvider(resource=Resource.create().merge(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("trainshed")

    def instrument(self, app: FastAPI) -> None:
        """Record a span for each request, except for health checks and scrapes."""
        FastAPIInstrumentor.instrument_app(
            app,
            tracer_provider=self._provider,
            meter_provider=NoOpMeterProvider(),
            excluded_urls=_QUIET,
            exclude_spans=["receive", "send"],
        )

    @contextmanager
    def span(self, name: str, **attributes: str) -> Iterator[None]:
        """Open a span until the context exits. Spans that start within it are its children."""
        with self._tracer.start_as_current_span(name, attributes=attributes):
            yield

    def close(self) -> None:
        """Send the remaining spans, and shut down."""
        self._provider.shutdown()
