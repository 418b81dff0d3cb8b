"""TLS between Ray's processes: only holders of the cluster's key take part."""

import socket
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from train_loop.system.ray_loopback import loopback_environment


def context(variables: dict[str, str], purpose: int) -> ssl.SSLContext:
    """Return a context as gRPC creates it: both ends need a certificate of the cluster."""
    made = ssl.SSLContext(purpose)
    made.load_cert_chain(variables["RAY_TLS_SERVER_CERT"], variables["RAY_TLS_SERVER_KEY"])
    made.load_verify_locations(variables["RAY_TLS_CA_CERT"])
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def exchange(server: dict[str, str], client: dict[str, str]) -> bytes:
    """Return what a server receives from a client. Raises ssl.SSLError."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs, context(client, ssl.PROTOCOL_TLS_CLIENT).wrap_socket(theirs, server_hostname="127.0.0.1") as one:
            one.sendall(b"token")

    with ThreadPoolExecutor(1) as thread, ours:
        sent = thread.submit(send)
        try:
            with context(server, ssl.PROTOCOL_TLS_SERVER).wrap_socket(ours, server_side=True) as one:
                return one.recv(100)
        finally:
            ours.close()
            sent.result()


def test_processes_of_a_ray_reach_each_other_and_no_other_ray(tmp_path: Path) -> None:
    one, other = ((tmp_path / name) for name in ("one", "other"))
    one.mkdir()
    other.mkdir()
    mine, foreign = loopback_environment(str(one)), loopback_environment(str(other))
    assert exchange(mine, mine) == b"token"
    for server, client in ((mine, foreign), (foreign, mine)):
        with pytest.raises(ssl.SSLError):
            exchange(server, client)
    assert {stat.S_IMODE(file.stat().st_mode) for file in one.iterdir()} == {0o600}
