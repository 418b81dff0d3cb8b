"""Servers that do not answer: one that drops packets, and one that accepts connections and says nothing."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def dropping_server() -> Iterator[str]:
    """The URL of a port that answers no packet, as the address of a host that is switched off."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # Linux drops connections to a server whose queue is full.
        stack.enter_context(socket.create_connection(server.getsockname()))
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def mute_server() -> Iterator[str]:
    """The URL of a server that takes connections and never answers, as one whose process is stopped."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
