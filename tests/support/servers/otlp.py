"""A collector of traces on loopback: parsed spans that OpenTelemetry sends over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A received span."""

    name: str
    id: str
    parent: str
    attributes: dict[str, str]


@dataclass
class Collector:
    """A destination of spans; while it hangs, it accepts spans without an answer."""

    url: str
    spans: list[Span] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)

    def named(self, name: str) -> list[Span]:
        """Return the spans of a name."""
        return [span for span in self.spans if span.name == name]

    def take(self, body: bytes) -> None:
        """Parse a request."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {one.key: one.value.string_value for one in span.attributes}
                    self.spans.append(Span(span.name, span.span_id.hex(), span.parent_span_id.hex(), attributes))


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            found.take(self.rfile.read(int(self.headers["content-length"])))
            found.answers.wait()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        found = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        found.answers.set()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            found.answers.set()
            server.shutdown()
            thread.join()
