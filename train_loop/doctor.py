"""`python -m train_loop.doctor`: asks every node what it is and what it sees, as a Ray job's entrypoint.

The answer is one line on standard output: the storage, by which drivers otherwise tell, is what is in question.
"""

import argparse
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from train_loop.leave import leave
from train_loop.network import socket_settings
from train_loop.run_dir import (
    TOKEN_FILE,
    VISIT_MARK,
    ClusterVisit,
    NetworkVisit,
    NodeVisit,
    Sight,
    answer_file,
    read_whole,
    storage_path,
    versions_here,
    why_unreadable,
    write_durably,
)

_MOST_NODES = 256
_ROUNDS = 2
"""The first starts a process on each node; the second has it at once, and tells the clock within milliseconds."""
_MOST_PAIRED = 6
"""Nodes of which each pair is tried if an all-reduce over all fails."""
_REDUCE_SECONDS, _PAIR_SECONDS, _START_SECONDS = 10.0, 4.0, 5.0
"""For an all-reduce, for one of a pair at least, and for its process to start."""
_SIGHT_SECONDS = 5.0
"""For so long a network file system may not show what was just written elsewhere."""


def main() -> None:
    """Visit all nodes and tell."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.doctor", description=__doc__)
    parser.add_argument("--folder", metavar="URI", help="where the service has left a token")
    parser.add_argument("--root", action="append", default=[], metavar="URI", help="what must be readable")
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    ray.init(address="auto", logging_level=logging.WARNING, log_to_driver=False)
    found = visit(arguments.folder, arguments.root, seconds=arguments.seconds)
    print(VISIT_MARK + found.model_dump_json(), flush=True)  # noqa: T201
    leave(0)


def visit(folder: str | None, roots: Sequence[str], *, seconds: float) -> ClusterVisit:
    """Ask all nodes at once, none of which is waited for longer than that."""
    deadline = time.monotonic() + seconds
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in alive[:_MOST_NODES]}
    # First, because it is not known what Ray's own tasks below take.
    free, total = ray.available_resources(), ray.cluster_resources()
    looks = {_on(look, node).remote(folder, roots, node): node for node in nodes}
    rounds = [_ask({_on(describe, node): node for node in nodes}, deadline) for _ in range(_ROUNDS)]
    sights = _collect(looks, deadline)
    network = check_network(nodes, deadline)
    return ClusterVisit(
        nodes=[
            _tell(NodeVisit(node=node, address=address), [told.get(node) for told in rounds], sights.get(node))
            for node, address in nodes.items()
        ],
        cpus=total.get("CPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        network=network,
        left_out=len(alive) - len(nodes),
    )


def describe() -> tuple[dict[str, str], float]:
    """On a node: what it runs, and its clock."""
    return versions_here(), time.time()


def look(folder: str | None, roots: Sequence[str], node: str) -> Sight:
    """On a node: whether it sees what the service has left, can answer beside it, and can list the roots."""
    unreadable = {root: fault for root in roots if (fault := why_unreadable(root))}
    if folder is None:
        return Sight(unreadable=unreadable)
    try:
        place = storage_path(folder)
        token = _read_patiently(lambda: read_whole(place / TOKEN_FILE).decode())
        if token is not None:
            write_durably(place / answer_file(node), token)
        return Sight(token=token, unreadable=unreadable)
    except Exception as error:
        return Sight(fault=_first_line(error), unreadable=unreadable)


def _read_patiently(read: Callable[[], str]) -> str | None:
    deadline = time.monotonic() + _SIGHT_SECONDS
    while True:
        try:
            return read()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.5)


def check_network(nodes: Mapping[str, str], deadline: float) -> NetworkVisit | None:
    """Run an all-reduce over all nodes and, if it fails, over each pair of some, until the deadline."""
    if len(nodes) < 2:
        return None
    error = _all_reduce(list(nodes), deadline)
    if error is None:
        return NetworkVisit(nodes=len(nodes))
    pairs = list(combinations(list(nodes)[:_MOST_PAIRED], 2))
    failed = dict[str, str]()
    for one, other in pairs:
        if time.monotonic() + _PAIR_SECONDS < deadline and (why := _all_reduce([one, other], deadline)):
            failed[f"{nodes[one]} and {nodes[other]}"] = why
    return NetworkVisit(nodes=len(nodes), failed=failed or {"all nodes": error})


def _all_reduce(nodes: Sequence[str], deadline: float) -> str | None:
    """Return why an all-reduce over nodes fails; None if it succeeds."""
    seconds = min(_REDUCE_SECONDS, deadline - time.monotonic())
    if seconds <= 0:
        return "no time was left"
    try:
        master = ray.get(_on(free_port, nodes[0]).remote(), timeout=seconds)
        tasks = [_on(reduce_here, node).remote(rank, len(nodes), master, seconds) for rank, node in enumerate(nodes)]
        said = ray.get(tasks, timeout=2 * seconds)
    except Exception as error:
        return _first_line(error)
    return next(filter(None, said), None)


def free_port() -> str:
    """On a node: an address and a port that is free there now."""
    address = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
        one.bind((address, 0))
        port = one.getsockname()[1]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def reduce_here(rank: int, world: int, master: str, seconds: float) -> str | None:
    """On a node: take part in an all-reduce, as a rank of a job would; why it failed, or None."""
    command = [sys.executable, "-m", "train_loop.network_check", "--rank", str(rank), "--world", str(world)]
    settings = socket_settings(ray.util.get_node_ip_address(), os.environ)
    try:
        done = subprocess.run(
            [*command, "--master", master, "--seconds", f"{seconds:g}"],
            env={**os.environ, **settings, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=seconds + _START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def _on(task: Callable[..., object], node: str) -> Any:
    """A task on that node and no other, which takes nothing from anybody."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(task).options(scheduling_strategy=there)


Told = tuple[Any, float, float]
"""What a node said, or the exception; when it was asked, and when the answer was there."""


def _ask(tasks: Mapping[Any, str], deadline: float) -> dict[str, Told]:
    asked = dict[Any, tuple[str, float]]()
    for task, node in tasks.items():
        # Read before the call, so that what the call takes makes the bounds of a clock wider, never wrong.
        sent = time.time()
        asked[task.remote()] = node, sent
    told = dict[str, Told]()
    while asked and (left := deadline - time.monotonic()) > 0:
        ready, _ = ray.wait(list(asked), timeout=left)
        for reference in ready:
            came = time.time()
            node, sent = asked.pop(reference)
            told[node] = _result(reference), sent, came
    return told


def _collect(references: Mapping[Any, str], deadline: float) -> dict[str, Any]:
    waiting = dict(references)
    found = dict[str, Any]()
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready, _ = ray.wait(list(waiting), timeout=left)
        found |= {waiting.pop(reference): _result(reference) for reference in ready}
    return found


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except Exception as error:
        return error


def _tell(node: NodeVisit, rounds: Sequence[Told | None], sight: Any) -> NodeVisit:
    described = [told for told in rounds if told is not None and not isinstance(told[0], Exception)]
    failures = [told[0] for told in rounds if told is not None and isinstance(told[0], Exception)]
    failures += [sight] if isinstance(sight, Exception) else []
    silent = None if described and sight is not None else "it did not answer in time"
    # The bounds that are closest to each other.
    bounds = min(((said[1] - came, said[1] - sent) for said, sent, came in described), key=_width, default=None)
    return node.model_copy(
        update={
            "versions": described[0][0][0] if described else None,
            "ahead": bounds,
            "sight": sight if isinstance(sight, Sight) else None,
            "trouble": _first_line(failures[0]) if failures else silent,
        }
    )


def _width(bounds: tuple[float, float]) -> float:
    return bounds[1] - bounds[0]


def _first_line(error: BaseException) -> str:
    # Of what a task raised Ray's text is a whole traceback, whose last line says what.
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[-1] if lines else type(cause).__name__


if __name__ == "__main__":
    main()
