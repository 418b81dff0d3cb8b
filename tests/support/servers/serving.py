"""An app on a real port, and a proxy that simulates network faults of responses."""

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI

from tests.support.waiting import wait_for

Answer = Iterator[bytes]
Fault = Callable[[socket.socket, Answer], None]
"""Function of the client's socket and the service's answer; the request is sent when the answer is first read."""


@contextmanager
def serving(app: FastAPI) -> Iterator[int]:
    """Run a real server until the block ends; yield its port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started, "the server")
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        app.state.shutdown.set()
        server.should_exit = True
        thread.join()


@dataclass
class Proxy:
    """A proxy that forwards each request on a separate connection; the next requests meet one fault each."""

    behind: int
    faults: deque[Fault] = field(default_factory=deque)
    seen: list[str] = field(default_factory=list)
    """The first line of each request."""

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting requests."""
        # A thread in accept() does not notice a closed socket; one more connection wakes it.
        listener, self._listener = self._listener, None  # type: ignore[assignment]
        socket.create_connection(listener.getsockname()).close()
        self._thread.join()
        listener.close()

    def _accept(self) -> None:
        listener = self._listener
        while self._listener is not None:
            caller, _ = listener.accept()
            threading.Thread(target=self._pass_on, args=(caller,), daemon=True).start()

    def _pass_on(self, caller: socket.socket) -> None:
        with caller, suppress(OSError):
            request = _read_request(caller)
            if not request:
                return
            self.seen.append(request.partition(b"\r\n")[0].decode())
            fault = self.faults.popleft() if self.faults else relay
            fault(caller, _answer(self.behind, request))


def relay(caller: socket.socket, answer: Answer) -> None:
    """Forward without a fault."""
    for part in answer:
        caller.sendall(part)


def lose(caller: socket.socket, answer: Answer) -> None:
    """Let the service process the request, and drop the response."""
    for _ in answer:
        pass


def drop(caller: socket.socket, answer: Answer) -> None:
    """Drop the request before the service gets it."""


def say(status: str, **headers: str) -> Fault:
    """Answer in place of the service."""
    lines = [f"HTTP/1.1 {status}", "content-length: 0", "connection: close"]
    text = "\r\n".join([*lines, *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()), "", ""])
    return lambda caller, answer: caller.sendall(text.encode())


def cut(after: int) -> Fault:
    """Forward this number of bytes of the response."""

    def fault(caller: socket.socket, answer: Answer) -> None:
        left = after
        for part in answer:
            caller.sendall(part[:left])
            left -= len(part)
            if left <= 0:
                return

    return fault


def _read_request(caller: socket.socket) -> bytes:
    request = b""
    while b"\r\n\r\n" not in request:
        part = caller.recv(65536)
        if not part:
            return b""
        request += part
    head, _, body = request.partition(b"\r\n\r\n")
    size = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < size:
        body += caller.recv(65536)
    return head.replace(b"keep-alive", b"close") + b"\r\n\r\n" + body


def _answer(port: int, request: bytes) -> Answer:
    with socket.create_connection(("127.0.0.1", port)) as service:
        service.sendall(request)
        while part := service.recv(65536):
            yield part
