"""Servers that do not answer: one drops packets, and one accepts connections without a response."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def dropping_server() -> Iterator[str]:
    """Yield the URL of a port that answers no packet, like a host that is switched off."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # Linux drops connections to a server whose queue is full.
        stack.enter_context(socket.create_connection(server.getsockname()))
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def mute_server() -> Iterator[str]:
    """Yield the URL of a server that accepts connections and never answers, like a stopped process."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
