"""Network check between nodes: connections of each pair, then an all-reduce over all."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from train_loop.run_dir import ALL_NODES, NetworkVisit
from train_loop.system.network import socket_settings

_MOST_PAIRED = 32
"""Maximum number of nodes whose pairs are checked."""
_MEET_SECONDS, _TRY_SECONDS, _AGAIN_SECONDS = 8.0, 3.0, 0.1
"""Timeout for all pairs, timeout for one connection, and pause before a retry."""
_START_SECONDS = 5.0
"""Extra time for a process to start and exit."""
_LEAST_SECONDS = 8.0
"""With less time than this, an all-reduce would time out also on a network without faults, while processes start."""
_EXCHANGED = b"x" * (1 << 20)
"""Payload larger than the first packets, which pass even with a wrong MTU."""


def on_node(task: Callable[..., object], node: str) -> Any:
    """Return a task that runs only on the given node and reserves no resources."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(task).options(scheduling_strategy=there)


def describe_failure(error: BaseException) -> str:
    """Return the last line of a task's error. Ray's text is a whole traceback."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[-1] if lines else type(cause).__name__


def check_network(nodes: Mapping[str, str], deadline: float) -> NetworkVisit | None:
    """Connect each pair of nodes, then run an all-reduce over all.

    Return None if there is only one node, or too little time. `nodes` are addresses by node id. If pairs fail to
    connect, the result names them and the all-reduce is skipped.
    """
    if len(nodes) < 2:
        return None
    failed = _meet_all(dict(list(nodes.items())[:_MOST_PAIRED]), deadline)
    if not failed:
        seconds = deadline - time.monotonic() - _START_SECONDS
        if seconds < _LEAST_SECONDS:
            return None
        if (error := _all_reduce(list(nodes), seconds)) is not None:
            failed = {ALL_NODES: error}
    return NetworkVisit(nodes=len(nodes), failed=failed)


def _meet_all(nodes: Mapping[str, str], deadline: float) -> dict[str, str]:
    seconds = min(_MEET_SECONDS, deadline - time.monotonic())
    if seconds <= 0:
        return {}
    try:
        ports = {node: on_node(free_port, node).remote() for node in nodes}
        places = dict(zip(ports, ray.get(list(ports.values()), timeout=seconds), strict=True))
        meetings = [
            on_node(meet, node).remote(
                place, {other: there for other, there in places.items() if other != node}, seconds
            )
            for node, place in places.items()
        ]
        faults: dict[str, dict[str, str]] = dict(zip(places, ray.get(meetings, timeout=2 * seconds), strict=True))
    except Exception as error:
        return {ALL_NODES: describe_failure(error)}
    by_address = sorted(nodes, key=nodes.__getitem__)
    pairs = {
        (one, other): faults[one].get(other) or faults[other].get(one) for one, other in combinations(by_address, 2)
    }
    return {f"{nodes[one]} and {nodes[other]}": fault for (one, other), fault in pairs.items() if fault}


def free_port() -> str:
    """Return the address of the node that runs this task, with a port that is currently free."""
    address = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
        one.bind((address, 0))
        port = one.getsockname()[1]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def meet(own: str, others: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Listen at `own` and exchange 1 MiB with every other node, which does the same; runs on the node.

    Return the errors by node. Finish after all exchanges in both directions, or after `seconds`.
    """
    deadline = time.monotonic() + seconds
    host, port = _split(own)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    met = threading.Semaphore(0)
    with (
        socket.create_server((host, port), family=family, backlog=2 * len(others) + 8) as server,
        ThreadPoolExecutor(len(others)) as pool,
    ):
        threading.Thread(target=_answer_all, args=(server, met), daemon=True).start()
        faults = dict(zip(others, pool.map(lambda place: _exchange(place, deadline), others.values()), strict=True))
        for _ in others:
            met.acquire(timeout=max(0.0, deadline - time.monotonic()))
        # Closing alone does not wake the thread that is blocked in accept.
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
    return {node: fault for node, fault in faults.items() if fault is not None}


def _answer_all(server: socket.socket, met: threading.Semaphore) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(connection, met), daemon=True).start()


def _answer(connection: socket.socket, met: threading.Semaphore) -> None:
    with connection, suppress(OSError):
        connection.settimeout(_TRY_SECONDS)
        left = len(_EXCHANGED)
        while left and (part := connection.recv(1 << 16)):
            left -= len(part)
        if not left:
            connection.sendall(b"y")
            met.release()


def _exchange(place: str, deadline: float) -> str | None:
    """Exchange the payload with the listener at `place`. Return the error, or None if it succeeds."""
    fault = "no time left before the deadline"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(_split(place), timeout=min(_TRY_SECONDS, left)) as connection:
                connection.sendall(_EXCHANGED)
                if connection.recv(1) == b"y":
                    return None
                fault = "the connection was closed"
        except TimeoutError:
            fault = "no answer to a connection"
        except OSError as error:
            fault = error.strerror or str(error)
        # A node that refuses may not listen yet.
        time.sleep(_AGAIN_SECONDS)
    return fault


def _split(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


def _all_reduce(nodes: Sequence[str], seconds: float) -> str | None:
    """Run an all-reduce over nodes. Return the error, or None if it succeeds."""
    try:
        master = ray.get(on_node(free_port, nodes[0]).remote(), timeout=seconds)
        tasks = [
            on_node(reduce_here, node).remote(rank, len(nodes), master, seconds) for rank, node in enumerate(nodes)
        ]
        faults = ray.get(tasks, timeout=seconds + _START_SECONDS)
    except Exception as error:
        return describe_failure(error)
    return next(filter(None, faults), None)


def reduce_here(rank: int, world: int, master: str, seconds: float) -> str | None:
    """Take part in an all-reduce like a job's rank; runs on the node. Return the error, or None if it succeeds."""
    command = [sys.executable, "-m", "train_loop.doctor.all_reduce", "--rank", str(rank), "--world", str(world)]
    settings = socket_settings(ray.util.get_node_ip_address(), os.environ)
    try:
        done = subprocess.run(
            [*command, "--master", master, "--seconds", f"{seconds:g}"],
            env={**os.environ, **settings, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=seconds + _START_SECONDS / 2,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")
