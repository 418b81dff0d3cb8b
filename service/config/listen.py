"""The address on which the service listens."""

import socket

from service.errors import AddressUnusable


def check_address(host: str, port: int) -> None:
    """Raise AddressUnusable if a service cannot listen on an address, for example because another program does."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            # As in uvicorn: connections that closed recently do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise AddressUnusable(f"{host}:{port}", error.strerror or str(error)) from error
