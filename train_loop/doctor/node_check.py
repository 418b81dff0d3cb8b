"""`python -m train_loop.doctor.node_check`: reports versions, clock, storage and network of every node, as a Ray job.

The report is one line on standard output: drivers report through the storage, but that is being checked here.
"""

import argparse
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from train_loop.doctor.network_probe import check_network, describe_failure, on_node
from train_loop.run_dir import (
    POD_DIGEST_VARIABLE,
    TOKEN_FILE,
    VISIT_MARK,
    ClusterVisit,
    NodeReport,
    PathCheck,
    answer_file,
    read_whole,
    storage_path,
    versions_here,
    why_unreadable,
    write_durably,
)
from train_loop.system.exit import leave

_MOST_NODES = 256
_ROUNDS = 2
"""Round 1 starts a process on each node; round 2 reuses it to measure the clock within milliseconds."""
_SIGHT_SECONDS = 5.0
"""Wait for the token; a network file system may show new files of other hosts late."""


def main() -> None:
    """Check all nodes and print the report."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.doctor.node_check", description=__doc__)
    parser.add_argument("--folder", metavar="URI", help="folder with the service's token file")
    parser.add_argument("--root", action="append", default=[], metavar="URI", help="root that all nodes must read")
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    ray.init(address="auto", logging_level=logging.WARNING, log_to_driver=False)
    found = visit(arguments.folder, arguments.root, seconds=arguments.seconds)
    print(VISIT_MARK + found.model_dump_json(), flush=True)  # noqa: T201
    leave(0)


def visit(folder: str | None, roots: Sequence[str], *, seconds: float) -> ClusterVisit:
    """Check all nodes concurrently, with one deadline after `seconds`."""
    deadline = time.monotonic() + seconds
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in alive[:_MOST_NODES]}
    # First, because the tasks below may take resources.
    free, total = ray.available_resources(), ray.cluster_resources()
    rounds = [_call_all({on_node(describe, node): node for node in nodes}, deadline) for _ in range(_ROUNDS)]
    # After the rounds, whose processes they reuse: storage that hangs would occupy these.
    path_checks = {on_node(check_paths, node).remote(folder, roots, node): node for node in nodes}
    sights = _collect(path_checks, deadline)
    network = check_network(nodes, deadline)
    return ClusterVisit(
        nodes=[
            _complete_report(
                NodeReport(node=node, address=address), [answers.get(node) for answers in rounds], sights.get(node)
            )
            for node, address in nodes.items()
        ],
        cpus=total.get("CPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        network=network,
        left_out=len(alive) - len(nodes),
    )


class Described(NamedTuple):
    """Versions, user id, clock and pod digest of a node."""

    versions: dict[str, str]
    uid: int
    clock: float
    pod_digest: str | None = None


def describe() -> Described:
    """Return the versions, user id, clock and pod of the node that runs this task."""
    return Described(versions_here(), os.getuid(), time.time(), os.environ.get(POD_DIGEST_VARIABLE))


def check_paths(folder: str | None, roots: Sequence[str], node: str) -> PathCheck:
    """Read the service's token, write the answer file in its folder and read the roots; runs on the node."""
    unreadable = {root: fault for root in roots if (fault := why_unreadable(root))}
    if folder is None:
        return PathCheck(unreadable=unreadable)
    try:
        place = storage_path(folder)
        token = _read_patiently(lambda: read_whole(place / TOKEN_FILE).decode())
        if token is not None:
            write_durably(place / answer_file(node), token)
        return PathCheck(token=token, unreadable=unreadable)
    except Exception as error:
        return PathCheck(fault=describe_failure(error), unreadable=unreadable)


def _read_patiently(read: Callable[[], str]) -> str | None:
    deadline = time.monotonic() + _SIGHT_SECONDS
    while True:
        try:
            return read()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.5)


TimedAnswer = tuple[Any, float, float]
"""A node's answer or exception, the Unix time of the request and that of the answer."""


def _call_all(tasks: Mapping[Any, str], deadline: float) -> dict[str, TimedAnswer]:
    pending = dict[Any, tuple[str, float]]()
    for task, node in tasks.items():
        # Read before the call: a slow call then widens the bounds of the clock but keeps them correct.
        sent = time.time()
        pending[task.remote()] = node, sent
    answers = dict[str, TimedAnswer]()
    while pending and (left := deadline - time.monotonic()) > 0:
        ready, _ = ray.wait(list(pending), timeout=left)
        for reference in ready:
            came = time.time()
            node, sent = pending.pop(reference)
            answers[node] = _result(reference), sent, came
    return answers


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


def _complete_report(node: NodeReport, rounds: Sequence[TimedAnswer | None], sight: Any) -> NodeReport:
    described = [answer for answer in rounds if answer is not None and not isinstance(answer[0], Exception)]
    failures = [answer[0] for answer in rounds if answer is not None and isinstance(answer[0], Exception)]
    failures += [sight] if isinstance(sight, Exception) else []
    silent = None if described and sight is not None else "it did not answer in time"
    # The narrowest bounds.
    clocks = ((answer.clock, sent, came) for answer, sent, came in described)
    bounds = min(((clock - came, clock - sent) for clock, sent, came in clocks), key=_width, default=None)
    return node.model_copy(
        update={
            "versions": described[0][0].versions if described else None,
            "uid": described[0][0].uid if described else None,
            "pod_digest": described[0][0].pod_digest if described else None,
            "ahead": bounds,
            "sight": sight if isinstance(sight, PathCheck) else None,
            "trouble": describe_failure(failures[0]) if failures else silent,
        }
    )


def _width(bounds: tuple[float, float]) -> float:
    return bounds[1] - bounds[0]


if __name__ == "__main__":
    main()
