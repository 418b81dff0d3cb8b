"""The process at the other end of a TCP connection on this machine.

Any user may listen on a loopback port that is free. So a client that sends a secret first proves which process has
accepted its connection. A check of the listener alone would not do: the connection may belong to an earlier one.
"""

import ipaddress
import socket
import time

import psutil

_POLL_SECONDS = 0.01

Place = tuple[str, int]
"""An IP address and a port."""


def is_peer(connection: socket.socket, process: psutil.Process) -> bool:
    """Return whether a process has accepted a connection. False if its sockets cannot be listed."""
    try:
        ends = _place(connection.getpeername()), _place(connection.getsockname())
        found = process.net_connections(kind="tcp")
    except (OSError, psutil.Error):
        return False
    return any(one.raddr and (_place(one.laddr), _place(one.raddr)) == ends for one in found)


def wait_for_peer(connection: socket.socket, process: psutil.Process, *, seconds: float) -> bool:
    """Return whether a process accepts a connection within `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_peer(connection, process):
        if time.monotonic() > deadline or not process.is_running():
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _place(address: tuple[str, int] | tuple[str, int, int, int]) -> Place:
    """Return an address in one notation: a socket of both families writes 127.0.0.1 as ::ffff:127.0.0.1."""
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), address[1]
