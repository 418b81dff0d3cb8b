# Generated from trainshed/_async/connection.py by `make client`; do not edit.

"""HTTP clients that send a key only to the service that it is for."""

from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import httpx

from trainshed.address import find_key, find_local, find_url

if TYPE_CHECKING:
    from trainshed.address import LocalService

_DIRECT: dict[str, httpx.BaseTransport | None] = dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]"))
"""Hosts to which httpx uses no proxy of the environment: a proxy cannot reach a service of this machine."""
_ACCEPT_SECONDS, _POLL_SECONDS = 2.0, 0.01
"""Timeout for the service to accept a connection, and the pause between two checks."""


def open_http(
    url: str | None = None, key: str | None = None, *, transport: httpx.BaseTransport | None = None
) -> httpx.Client:
    """Return an HTTP client of a service. Without a URL, only the service of this machine's home receives requests.

    Raises NoKeyError if no key is found, and InvalidUrl if no URL is found.
    """
    headers = {"Authorization": f"Bearer {key or find_key()}"}
    local = None if url else find_local()
    if local is None:
        return httpx.Client(base_url=url or find_url(), headers=headers, transport=transport, mounts=_DIRECT)
    # A proxy of the environment would receive the key.
    hooks: dict[str, list[Callable[..., Any]]] = {"request": [PeerCheck(local)]}
    return httpx.Client(base_url=local.url, headers=headers, transport=transport, event_hooks=hooks, trust_env=False)


class PeerCheck:
    """A hook that checks, before a request is sent, that the home's service has accepted its connection.

    Any user may listen on the port of a service that has ended.
    """

    def __init__(self, service: "LocalService") -> None:
        self._service = service

    def __call__(self, request: httpx.Request) -> None:
        """Have httpx report each new connection."""
        request.extensions = {**request.extensions, "trace": self._trace}

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        if event != "connection.connect_tcp.complete":
            return
        stream = info["return_value"]
        connection, deadline = stream.get_extra_info("socket"), monotonic() + _ACCEPT_SECONDS
        while not self._service.accepted(connection):
            if monotonic() > deadline or not self._service.runs():
                stream.close()
                raise httpx.ConnectError(
                    f"no service runs in {self._service.address_file.parent}; another program listens at "
                    f"{self._service.url}"
                )
            sleep(_POLL_SECONDS)
