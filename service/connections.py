"""Limits of connections, which hold before anybody has shown a key: how many, for how long, from one address.

uvicorn limits neither the time of a request's head nor that of its body, and a limit of its own is counted for requests
alone. So its protocol is extended here (ADR 22).
"""

import asyncio
import resource
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
"""Connections that the event loop may accept in one turn."""
_TURNS = 3
"""A connection is counted a turn after it was accepted, and a refused one is closed a turn after that."""
_OTHER_FILES = 256
"""Files that the service needs besides connections: the database, storage, logs, pipes."""
_LOOK_SECONDS = 1.0
_BODY_GRACE_SECONDS = 10.0
"""How long a body may take however slow its sender is."""


@dataclass(frozen=True)
class Limits:
    """What connections may take."""

    total: int
    per_address: int
    """It does not hold for proxies that are trusted to name their clients."""
    head_seconds: float
    """For the head of a request, from the connection or the first byte on."""
    body_bytes_per_second: float
    """A body that arrives more slowly on average is cut off."""
    proxies: tuple[IPv4Network | IPv6Network, ...] = ()

    def trusts(self, address: str) -> bool:
        """Return whether an address is that of a trusted proxy."""
        try:
            place = ip_address(address.partition("%")[0])
        except ValueError:
            return False
        return any(place in network for network in self.proxies)


@dataclass
class Connections:
    """The connections of a server. Those whose request has not arrived are dropped for new ones, the oldest first."""

    limits: Limits
    clock: Callable[[], float] = time.monotonic
    _waiting: "OrderedDict[BoundedProtocol, None]" = field(default_factory=OrderedDict)
    _by_address: Counter[str] = field(default_factory=Counter)
    _refused: int = 0
    _told: float = -_LOOK_SECONDS

    def enter(self, connection: "BoundedProtocol", address: str) -> bool:
        """Count a new connection; False: there is no room for it."""
        limits = self.limits
        if self._by_address.total() >= limits.total and not self._drop_oldest():
            return self._refuse("all", address)
        if self._by_address[address] >= limits.per_address and not limits.trusts(address):
            return self._refuse("address", address)
        self._by_address[address] += 1
        self.wait(connection)
        return True

    def leave(self, connection: "BoundedProtocol", address: str) -> None:
        """Count one that has ended no more."""
        self.work(connection)
        self._by_address[address] -= 1
        if self._by_address[address] <= 0:
            del self._by_address[address]

    def wait(self, connection: "BoundedProtocol") -> None:
        """Note that a connection waits for the head of a request."""
        self._waiting[connection] = None

    def work(self, connection: "BoundedProtocol") -> None:
        """Note that a request has arrived."""
        self._waiting.pop(connection, None)

    def _drop_oldest(self) -> bool:
        if not self._waiting:
            return False
        oldest, _ = self._waiting.popitem(last=False)
        oldest.drop("another connection needed its place")
        return True

    def _refuse(self, limit: str, address: str) -> bool:
        self._refused += 1
        if self.clock() - self._told >= _LOOK_SECONDS:
            log.warning("connections_refused", count=self._refused, limit=limit, address=address)
            self._refused, self._told = 0, self.clock()
        return False


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with limits of connections and of the time that a request may take to arrive."""

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
        """Whose connection is counted; None if it is not."""
        self._timer: asyncio.TimerHandle | None = None
        self._head_began: float | None = None
        self._body_began: float | None = None
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or end it at once."""
        address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._all.enter(self, address):
            transport.abort()
            return
        self._address = address
        super().connection_made(transport)
        self._head_began = self.loop.time()
        self._timer = self.loop.call_later(_LOOK_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._address is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._all.leave(self, self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and note how far the request is."""
        if self._address is None:
            return
        self._body_bytes += len(data)
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._note()

    def drop(self, reason: str) -> None:
        """End the connection; whoever is at the other end has not sent a request."""
        log.debug("connection_dropped", reason=reason, address=self._address)
        self.transport.abort()

    def _note(self) -> None:
        """Note whether the head or the body of a request is on its way, or neither."""
        state, now = self.conn.their_state, self.loop.time()
        if state is h11.IDLE:
            self._all.wait(self)
            self._body_began = None
            # A connection that is kept alive has uvicorn's limit; the head's begins with its first byte.
            if self._head_began is None and self.conn.trailing_data[0]:
                self._head_began = now
            return
        self._all.work(self)
        self._head_began = None
        if state is not h11.SEND_BODY:
            self._body_began = None
        elif self._body_began is None:
            self._body_began, self._body_bytes = now, 0

    def _look(self) -> None:
        """End the connection if its request takes too long to arrive."""
        now, limits = self.loop.time(), self._limits
        if self._head_began is not None and now - self._head_began > limits.head_seconds:
            self.drop("the head of its request took too long")
            return
        if self.flow.read_paused:
            # It is we who do not read.
            self._body_began, self._body_bytes = (None if self._body_began is None else now), 0
        if self._body_began is not None:
            allowed = _BODY_GRACE_SECONDS + self._body_bytes / limits.body_bytes_per_second
            if now - self._body_began > allowed:
                self.drop("the body of its request came too slowly")
                return
        self._timer = self.loop.call_later(_LOOK_SECONDS, self._look)


def parse_proxies(allowed: str) -> tuple[IPv4Network | IPv6Network, ...]:
    """Parse FORWARDED_ALLOW_IPS as uvicorn reads it: addresses, networks, or * for all; names are no addresses."""
    if allowed.strip() == "*":
        return ip_network("0.0.0.0/0"), ip_network("::/0")
    return tuple(network for part in allowed.split(",") if (network := _network(part.strip())) is not None)


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def bounded(limits: Limits) -> type[asyncio.Protocol]:
    """Return the class of connections of a server with these limits, for `uvicorn.Config(http=…)`."""
    connections = Connections(limits)

    # uvicorn calls it as it would call a class.
    return cast("type[asyncio.Protocol]", partial(BoundedProtocol, connections=connections))


def raise_open_files() -> int:
    """Let this process open as many files as the system allows it to; return how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def room_for_connections(files: int) -> int:
    """Return how many connections a process may have that may open so many files."""
    return max(files - _OTHER_FILES - _TURNS * BACKLOG, 16)
