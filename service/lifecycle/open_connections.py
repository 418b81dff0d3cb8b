"""The open connections of a server, and which of them is closed if a limit is reached."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import structlog

from service.domain.access.rate_limit import client_network

log = structlog.get_logger(__name__)
_LOG_SECONDS = 1.0
"""Minimum time between two log lines about closed and refused connections."""


class Connection(Protocol):
    """An open connection."""

    @property
    def is_known(self) -> bool:
        """Return whether a valid key or token has authenticated a request of the connection."""

    def abort(self, reason: str) -> None:
        """Close the connection without an answer."""


class Standing(IntEnum):
    """The standing of a connection. At a limit, the lowest is closed first; a busy caller is never closed."""

    IDLE_STRANGER = 0
    BUSY_STRANGER = 1
    IDLE_CALLER = 2
    BUSY_CALLER = 3


@dataclass
class _Network:
    """The connections of one network, by standing, each from the oldest to the newest."""

    name: str
    queues: tuple["OrderedDict[Connection, None]", ...] = field(
        default_factory=lambda: tuple(OrderedDict[Connection, None]() for _ in Standing)
    )

    @property
    def size(self) -> int:
        return sum(map(len, self.queues))


@dataclass
class _Place:
    """The network of a connection, and its standing."""

    network: _Network
    standing: Standing


class OpenConnections:
    """The open connections of a server: `total` of all, `per_network` from one address or one /64 of IPv6.

    At a limit, a new connection replaces an old one: strangers before callers with a key, idle before busy ones, and
    first those of the network that has most of them. So a network can shut out only itself.
    """

    def __init__(self, total: int, per_network: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._per_network, self._clock = total, per_network, clock
        self._places = dict[Connection, _Place]()
        self._networks = dict[str, _Network]()
        self._unreported, self._reported_at = 0, -_LOG_SECONDS

    def add(self, connection: Connection, address: str, *, trusted: bool = False) -> bool:
        """Add a new connection; return False if a limit refuses it. A trusted proxy has no limit of its own."""
        name = client_network(address)
        network = self._networks.get(name) or _Network(name)
        if not trusted and network.size >= self._per_network:
            if not self._close_one([network]):
                return self._report("address", address, refused=True)
            self._report("address", address)
        elif len(self._places) >= self._total:
            if not self._close_one(self._networks.values()):
                return self._report("total", address, refused=True)
            self._report("total", address)
        self._networks[name] = network
        self._place(connection, network, Standing.IDLE_STRANGER)
        return True

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection. Repeatable."""
        place = self._places.pop(connection, None)
        if place is not None:
            del place.network.queues[place.standing][connection]
            if not place.network.size:
                self._networks.pop(place.network.name, None)

    def mark(self, connection: Connection, *, idle: bool) -> None:
        """Record whether a connection is idle: it waits for a request, or its client does not read the answer."""
        place = self._places.get(connection)
        if place is not None and (standing := _standing(connection, idle=idle)) != place.standing:
            del place.network.queues[place.standing][connection]
            self._place(connection, place.network, standing)

    def _place(self, connection: Connection, network: _Network, standing: Standing) -> None:
        network.queues[standing][connection] = None
        self._places[connection] = _Place(network, standing)

    def _close_one(self, networks: Iterable[_Network]) -> bool:
        """Close the connection that matters least; return False if all are those of busy callers."""
        for standing in (Standing.IDLE_STRANGER, Standing.BUSY_STRANGER, Standing.IDLE_CALLER):
            while queue := max((network.queues[standing] for network in networks), key=len, default=None):
                victim = next(iter(queue))
                # Its caller may have been authenticated since.
                self.mark(victim, idle=standing in (Standing.IDLE_STRANGER, Standing.IDLE_CALLER))
                if self._places[victim].standing == standing:
                    self.remove(victim)
                    victim.abort("the limit of connections is reached")
                    return True
        return False

    def _report(self, limit: str, address: str, *, refused: bool = False) -> bool:
        """Log at most once a second that a limit is reached. Returns False."""
        self._unreported += 1
        if self._clock() - self._reported_at >= _LOG_SECONDS:
            log.warning("connections_limited", count=self._unreported, limit=limit, address=address, refused=refused)
            self._unreported, self._reported_at = 0, self._clock()
        return False


def _standing(connection: Connection, *, idle: bool) -> Standing:
    if connection.is_known:
        return Standing.IDLE_CALLER if idle else Standing.BUSY_CALLER
    return Standing.IDLE_STRANGER if idle else Standing.BUSY_STRANGER
