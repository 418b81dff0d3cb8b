"""Receivers of webhooks on loopback: real sockets that answer or misbehave as a test requires."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Act = Callable[[BaseHTTPRequestHandler], None]


@dataclass(frozen=True)
class Request:
    """A request that a receiver got."""

    path: str
    headers: dict[str, str]
    body: str


@dataclass
class Receiver:
    """A receiver; a test sets `act`, its reaction to requests."""

    act: Act
    port: int = 0
    got: list[Request] = field(default_factory=list)

    def url(self, path: str = "/hook", *, host: str = "127.0.0.1", scheme: str = "http") -> str:
        """Return the URL of the receiver."""
        return f"{scheme}://{host}:{self.port}{path}"


def answer(status: int, **headers: str) -> Act:
    """Answer with a status, and headers whose names have no underscores."""

    def act(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("content-length", "0")
        handler.end_headers()

    return act


RECEIVED = answer(200)


def never_answer(handler: BaseHTTPRequestHandler) -> None:
    """Keep the connection open without an answer, until the client disconnects."""
    handler.rfile.read(1)


def send_garbage(handler: BaseHTTPRequestHandler) -> None:
    """Send bytes that are not HTTP."""
    handler.wfile.write(b"\x00\xff hello\r\n\r\n")


def send_endless_body(handler: BaseHTTPRequestHandler) -> None:
    """Send an endless body."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100_000):
        handler.wfile.write(b"x" * 65536)


def send_slow_headers(handler: BaseHTTPRequestHandler) -> None:
    """Send endless headers, one byte at a time."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
    for _ in range(600):
        handler.wfile.write(b"y")
        time.sleep(0.1)


@contextmanager
def receiving(act: Act = RECEIVED, *, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Run a receiver in separate threads for the length of a test."""
    receiver = Receiver(act)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.got.append(Request(self.path, headers, body))
            try:
                receiver.act(self)
            except OSError:
                self.close_connection = True

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore disconnects of clients."""

    with Server(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        receiver.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
