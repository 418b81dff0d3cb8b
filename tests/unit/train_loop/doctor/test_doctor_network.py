"""Network checks between nodes, over real loopback sockets."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

from train_loop.doctor.network_probe import check_network, meet


def places(count: int) -> dict[str, str]:
    """Return addresses with free ports, by node name."""
    servers = [socket.create_server((f"127.0.0.{number}", 0)) for number in range(1, count + 1)]
    found = {f"node{number}": "{}:{}".format(*one.getsockname()) for number, one in enumerate(servers)}
    for server in servers:
        server.close()
    return found


def meet_all(there: dict[str, str], *, silent: str | None = None, seconds: float = 2) -> dict[str, dict[str, str]]:
    """Return each node's report on the others; the silent node never listens."""
    with ThreadPoolExecutor(len(there)) as pool:
        meetings = {
            node: pool.submit(meet, place, {other: at for other, at in there.items() if other != node}, seconds)
            for node, place in there.items()
            if node != silent
        }
        return {node: meeting.result(timeout=30) for node, meeting in meetings.items()}


def test_nodes_that_reach_each_other_have_no_faults() -> None:
    assert meet_all(places(5), seconds=30) == {f"node{number}": {} for number in range(5)}


def test_unreachable_node_is_reported_by_each_other_node() -> None:
    assert meet_all(places(3), silent="node1") == {
        "node0": {"node1": "Connection refused"},
        "node2": {"node1": "Connection refused"},
    }


def test_node_that_drops_packets_is_reported() -> None:
    there = places(2)
    host, _, port = there["node1"].partition(":")
    # A socket that listens but never accepts takes some connections and drops all further ones.
    with socket.create_server((host, int(port)), backlog=0), socket.create_connection((host, int(port))):
        faults = meet(there["node0"], {"node1": there["node1"]}, 1.0)
    assert faults == {"node1": "no answer to a connection"}


def test_too_little_time_is_no_fault_of_the_network() -> None:
    assert check_network({"node0": "127.0.0.1", "node1": "127.0.0.2"}, time.monotonic()) is None
