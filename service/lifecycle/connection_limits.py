"""Connection limits, enforced before authentication: total, per address, and time to receive a request.

uvicorn has no timeout for the head or the body of a request, and its concurrency limit counts requests only. This
module extends its HTTP protocol (ADR 22).
"""

import asyncio
import resource
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, cast

import h11
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = structlog.get_logger(__name__)
BACKLOG = 128
"""Maximum number of connections that the event loop accepts in one iteration."""
_ITERATIONS = 3
"""Event loop iterations from accepting a connection to closing it if it is refused."""
_OTHER_FILES = 256
"""File descriptors reserved for the database, storage, logs and pipes."""
_CHECK_SECONDS = 1.0
_BODY_GRACE_SECONDS = 10.0
"""Time that every body gets, whatever its rate."""


@dataclass(frozen=True)
class Limits:
    """Limits of the connections of a server."""

    total: int
    per_address: int
    """Trusted proxies are exempt."""
    head_seconds: float
    """Timeout of a request's head, from the connection or from its first byte."""
    body_bytes_per_second: float
    """Minimum average rate of a request's body."""
    proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    """Addresses of trusted proxies."""

    def trusts(self, address: str) -> bool:
        """Return whether an address belongs to a trusted proxy."""
        try:
            place = ip_address(address.partition("%")[0])
        except ValueError:
            return False
        return any(place in network for network in self.proxies)


@dataclass
class Connections:
    """The open connections of a server. If it is full, the oldest one without a complete request head is closed."""

    limits: Limits
    clock: Callable[[], float] = time.monotonic
    _waiting: "OrderedDict[BoundedProtocol, None]" = field(default_factory=OrderedDict)
    _by_address: Counter[str] = field(default_factory=Counter)
    _refused: int = 0
    _logged: float = -_CHECK_SECONDS

    def add(self, connection: "BoundedProtocol", address: str) -> bool:
        """Add a new connection; return False if a limit refuses it."""
        limits = self.limits
        # First, so that an address at its limit cannot close the connections of others.
        if self._by_address[address] >= limits.per_address and not limits.trusts(address):
            return self._refuse("address", address)
        if self._by_address.total() >= limits.total and not self._close_oldest():
            return self._refuse("total", address)
        self._by_address[address] += 1
        self.mark_waiting(connection)
        return True

    def remove(self, connection: "BoundedProtocol", address: str) -> None:
        """Remove a closed connection."""
        self.mark_busy(connection)
        self._by_address[address] -= 1
        if self._by_address[address] <= 0:
            del self._by_address[address]

    def mark_waiting(self, connection: "BoundedProtocol") -> None:
        """Note that the connection waits for the head of a request: it may be closed for another one."""
        self._waiting[connection] = None

    def mark_busy(self, connection: "BoundedProtocol") -> None:
        """Note that the connection has a complete request head."""
        self._waiting.pop(connection, None)

    def _close_oldest(self) -> bool:
        if not self._waiting:
            return False
        oldest, _ = self._waiting.popitem(last=False)
        oldest.abort("the limit of connections is reached")
        return True

    def _refuse(self, limit: str, address: str) -> bool:
        self._refused += 1
        if self.clock() - self._logged >= _CHECK_SECONDS:
            log.warning("connections_refused", count=self._refused, limit=limit, address=address)
            self._refused, self._logged = 0, self.clock()
        return False


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with connection limits and timeouts for receiving a request."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all, self._limits = connections, connections.limits
        self._address: str | None = None
        """The client's address; None if the connection was refused."""
        self._timer: asyncio.TimerHandle | None = None
        self._head_began: float | None = None
        self._body_began: float | None = None
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or close it at once."""
        address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._all.add(self, address):
            transport.abort()
            return
        self._address = address
        super().connection_made(transport)
        self._head_began = self.loop.time()
        self._timer = self.loop.call_later(_CHECK_SECONDS, self._check_timeouts)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's place."""
        if self._address is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._all.remove(self, self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read, and update the timeouts."""
        if self._address is None:
            return
        self._body_bytes += len(data)
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """Wait for the next request, and update the timeouts."""
        super().on_response_complete()
        self._update()

    def abort(self, reason: str) -> None:
        """Close the connection without an answer."""
        log.debug("connection_aborted", reason=reason, address=self._address)
        self.transport.abort()

    def _update(self) -> None:
        """Start or stop the timeouts, depending on the part of a request that the client is sending."""
        state, now = self.conn.their_state, self.loop.time()
        if state is h11.IDLE:
            self._all.mark_waiting(self)
            self._body_began = None
            # uvicorn's keep-alive timeout holds until the first byte of the next head.
            if self._head_began is None and self.conn.trailing_data[0]:
                self._head_began = now
            return
        self._all.mark_busy(self)
        self._head_began = None
        if state is not h11.SEND_BODY:
            self._body_began = None
        elif self._body_began is None:
            self._body_began, self._body_bytes = now, 0

    def _check_timeouts(self) -> None:
        """Close the connection if its request takes too long to arrive."""
        now, limits = self.loop.time(), self._limits
        if self._head_began is not None and now - self._head_began > limits.head_seconds:
            self.abort("the head of the request timed out")
            return
        if self.flow.read_paused:
            # The application does not read: the client is not at fault.
            self._body_began, self._body_bytes = (None if self._body_began is None else now), 0
        if self._body_began is not None:
            allowed = _BODY_GRACE_SECONDS + self._body_bytes / limits.body_bytes_per_second
            if now - self._body_began > allowed:
                self.abort("the body of the request is too slow")
                return
        self._timer = self.loop.call_later(_CHECK_SECONDS, self._check_timeouts)


def parse_proxies(allowed: str) -> tuple[IPv4Network | IPv6Network, ...]:
    """Parse FORWARDED_ALLOW_IPS: addresses, networks, or `*` for all. Host names are ignored."""
    if allowed.strip() == "*":
        return ip_network("0.0.0.0/0"), ip_network("::/0")
    return tuple(network for part in allowed.split(",") if (network := _network(part.strip())) is not None)


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def bounded(limits: Limits) -> type[asyncio.Protocol]:
    """Return a protocol with these limits for `uvicorn.Config(http=…)`."""
    connections = Connections(limits)
    # uvicorn only calls it, as it would call a class.
    return cast("type[asyncio.Protocol]", partial(BoundedProtocol, connections=connections))


def raise_open_files() -> None:
    """Raise this process's limit of open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        # macOS reports an unlimited hard limit and rejects it.
        log.warning("open_files_not_raised", error=str(error))


def max_connections() -> int:
    """Return the number of connections for which this process may open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections_within(sys.maxsize if soft == resource.RLIM_INFINITY else soft)


def connections_within(files: int) -> int:
    """Return the number of connections that fit into a limit of open files."""
    return max(files - _OTHER_FILES - _ITERATIONS * BACKLOG, 16)
