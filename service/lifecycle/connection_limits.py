"""Connection limits, enforced before authentication: number, and time to send a request and to read its answer.

uvicorn has no timeout for the head or the body of a request or for an answer that is not read, and its concurrency
limit counts requests only. This module extends its HTTP protocol (ADR 22).
"""

import asyncio
import resource
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, cast

import h11
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from service.lifecycle.open_connections import OpenConnections

log = structlog.get_logger(__name__)
BACKLOG = 128
"""Maximum number of connections that the event loop accepts in one iteration."""
_ITERATIONS = 3
"""Event loop iterations from accepting a connection to closing it if it is refused."""
_OTHER_FILES = 256
"""File descriptors reserved for the database, storage, logs and pipes."""
_CHECK_SECONDS = 1.0
_NO_LINGER = struct.pack("ii", 1, 0)
_GRACE_SECONDS = 10.0
"""Time that every body and every answer gets, whatever its rate."""
_MOST_UNREAD = 16 << 10
"""Bytes of answers above which the application waits for the client to read, in this process and in the kernel."""
_MOST_PIPELINED = 16 << 10
"""Maximum bytes of requests that a client sends before it has read the answer to the one before."""


@dataclass(frozen=True)
class Limits:
    """Limits of the connections of a server."""

    total: int
    per_address: int
    """Trusted proxies are exempt."""
    head_seconds: float
    """Timeout of a request's head, from the connection or from its first byte."""
    body_bytes_per_second: float
    """Minimum average rate of a request's body, and of an answer that waits to be read."""
    proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    """Addresses of trusted proxies."""

    def trusts(self, address: str) -> bool:
        """Return whether an address belongs to a trusted proxy."""
        try:
            place = ip_address(address.partition("%")[0])
        except ValueError:
            return False
        return any(place in network for network in self.proxies)


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with connection limits and timeouts for requests and unread answers."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Limits,
        open_connections: OpenConnections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all, self._limits = open_connections, limits
        self._address: str | None = None
        """The client's address; None if the connection was refused."""
        self._known = False
        self._timer: asyncio.TimerHandle | None = None
        self._head_began: float | None = None
        self._body_began: float | None = None
        self._body_bytes = 0
        self._unread: tuple[float, int] | None = None
        """Since when the client does not read its answer fast enough, and the unread bytes at that time."""

    @property
    def is_known(self) -> bool:
        """Return whether a valid key or token has authenticated a request of the connection."""
        self._known = self._known or (self.scope is not None and "key_id" in self.scope["state"])
        return self._known

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or close it at once."""
        address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._all.add(self, address, trusted=self._limits.trusts(address)):
            transport.abort()
            return
        self._address = address
        super().connection_made(transport)
        _limit_unread(transport)
        self._head_began = self.loop.time()
        self._timer = self.loop.call_later(_CHECK_SECONDS, self._check_timeouts)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's place."""
        if self._address is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._all.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read, and update the timeouts."""
        if self._address is None:
            return
        self._body_bytes += len(data)
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > _MOST_PIPELINED:
            self.abort("too many requests are sent before their answers are read")
        self._update()

    def on_response_complete(self) -> None:
        """Wait for the next request, and update the timeouts."""
        # Asked now: the next request has a scope of its own.
        _ = self.is_known
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        """Hold back the answer, because the client does not read."""
        super().pause_writing()
        self._update()

    def resume_writing(self) -> None:
        """Continue with the answer: the client has read."""
        super().resume_writing()
        self._unread = None
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Answer that a request is invalid and close the connection; abort it if an answer to it has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The application may have the head of the request already. Nothing that it answers can be sent.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.abort(msg)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore a request to upgrade the connection, as HTTP permits; uvicorn would log three warnings."""

    def abort(self, reason: str) -> None:
        """Close the connection without an answer."""
        log.debug("connection_aborted", reason=reason, address=self._address)
        if self.transport.get_write_buffer_size():
            # Otherwise the kernel keeps the unread answer for minutes.
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _update(self) -> None:
        """Start or stop the timeouts, depending on the part of a request that the client is sending."""
        state, now = self.conn.their_state, self.loop.time()
        answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)
        self._all.mark(self, idle=state is h11.IDLE or answered or self.flow.write_paused)
        if state is h11.IDLE:
            self._body_began = None
            # uvicorn's keep-alive timeout holds until the first byte of the next head.
            if self._head_began is None and self.conn.trailing_data[0]:
                self._head_began = now
            return
        self._head_began = None
        if state is not h11.SEND_BODY:
            self._body_began = None
        elif self._body_began is None:
            self._body_began, self._body_bytes = now, 0

    def _check_timeouts(self) -> None:
        """Close the connection if its request takes too long to arrive, or its answer to be read."""
        reason = self._exceeded(self.loop.time())
        if reason is not None:
            self.abort(reason)
        else:
            self._timer = self.loop.call_later(_CHECK_SECONDS, self._check_timeouts)

    def _exceeded(self, now: float) -> str | None:
        """Return the timeout that the client exceeds; None if there is none."""
        if self._head_began is not None and now - self._head_began > self._limits.head_seconds:
            return "the head of the request timed out"
        if self.flow.read_paused:
            # The application does not read: the client is not at fault.
            self._body_began, self._body_bytes = (None if self._body_began is None else now), 0
        if self._body_began is not None and self._is_slow(now - self._body_began, self._body_bytes):
            return "the body of the request is too slow"
        # A closing connection stays open until its answer is read.
        waits = self.flow.write_paused or self.transport.is_closing()
        unread = self.transport.get_write_buffer_size() if waits else 0
        self._unread = (self._unread or (now, unread)) if unread else None
        if self._unread is not None and self._is_slow(now - self._unread[0], self._unread[1] - unread):
            return "the answer is read too slowly"
        return None

    def _is_slow(self, seconds: float, transferred: int) -> bool:
        return seconds > _GRACE_SECONDS + transferred / self._limits.body_bytes_per_second


def _limit_unread(transport: asyncio.Transport) -> None:
    """Bound the bytes of answers that a connection keeps in memory while its client does not read."""
    transport.set_write_buffer_limits(high=_MOST_UNREAD)
    # Not on every system. It also shows progress in small steps, so that a slow reader is told from none.
    with suppress(OSError, AttributeError):
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNREAD)


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
    connections = OpenConnections(limits.total, limits.per_address)
    # uvicorn only calls it, as it would call a class.
    return cast("type[asyncio.Protocol]", partial(BoundedProtocol, limits=limits, open_connections=connections))


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
