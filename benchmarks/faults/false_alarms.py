"""False alarms and detection times of a job on three hosts, for an hour, while all cores are busy.

`python -m benchmarks.faults.false_alarms [--minutes N] [--quick]`. It needs root and iproute2. Hosts are namespaces of
this machine. One endless process per core competes with the job. Every fifth minute a host is frozen for 5 s, which
must not count as a loss. Every fifteenth minute the network of a host is cut until its loss is reported.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.faults.hosts import LIMIT, NODES, Ours, cluster_of, switch_on
from benchmarks.harness import command_line, markdown_table, parse, write_result
from benchmarks.workload import TOY, Workload
from tests.support.hosts.hosts import why_no_hosts
from tests.support.waiting import wait_for

ALARMS = ("host_silent", "host_lost", "workers_lost", "stalled", "storage_unavailable", "waiting_for_capacity")
FROZEN, FREEZE_EVERY, CUT_EVERY = 5.0, 5, 15
"""Seconds for which a host is frozen; minutes between freezes and between cuts."""


def main() -> None:
    """Run the job with injected faults, and compare the reported alarms with them."""
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=int, default=60)
    arguments = parse(parser, rounds=1)
    why = why_no_hosts()
    if why is not None:
        raise SystemExit(why)
    minutes = 2 if arguments.quick else arguments.minutes
    workload = Workload(config=TOY, world=4, sequence_length=32, steps=40_000)
    with cluster_of(workload) as (cluster, folder), busy_cores() as load:
        cluster.start_service()
        # More steps than an hour allows: many epochs.
        job = Ours(cluster, workload, folder, max_steps=4_000_000)
        wait_for(lambda: len(job.steps()) > 20, "the first steps", seconds=LIMIT)
        done = list(faults(job, minutes, cut_every=2 if arguments.quick else CUT_EVERY))
        alarms = [event for name in ALARMS for event in job.events(name)]
        steps, groups = len(job.steps()), len(job.events("group_started"))
        job.cancel()
    write_result(
        "false-alarms",
        settings={"minutes": minutes, "nodes": NODES, "busy": load, "frozen": FROZEN, "quick": arguments.quick},
        data=[{"done": done, "alarms": alarms, "steps": steps, "groups": groups}],
        table=table(minutes, done, alarms, steps=steps, groups=groups),
        folder=arguments.results,
    )


@contextmanager
def busy_cores() -> Iterator[int]:
    """Run one endless process per core in the body; yield their number."""
    count = os.cpu_count() or 1
    endless = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield count
    finally:
        for process in endless:
            process.kill()
            process.wait()


def faults(job: Ours, minutes: int, *, cut_every: int) -> Iterator[dict[str, Any]]:
    """Freeze and cut hosts for `minutes`; yield each fault with its start and end."""
    begun = time.time()
    for minute in range(1, minutes + 1):
        time.sleep(max(0.0, begun + 60 * minute - time.time()))
        if minute % cut_every == 0:
            yield cut(job)
            switch_on(job)
        elif minute % FREEZE_EVERY == 0:
            yield freeze(job)
        print(f"minute {minute} of {minutes}: {len(job.steps())} steps", flush=True)


def cut(job: Ours) -> dict[str, Any]:
    """Cut the network of the last rank's host until its loss is reported; wait for the next group."""
    host, hit = job.victim(), time.time()
    host.cut()
    (loss, *_) = wait_for(lambda: job.events("workers_lost", hit), "the report of the loss", seconds=LIMIT)
    host.heal()
    wait_for(lambda: job.events("training_started", loss["time"]), "the next group", seconds=LIMIT)
    return {"what": "cut", "host": host.name, "time": hit, "end": time.time(), "lost": loss["time"]}


def freeze(job: Ours) -> dict[str, Any]:
    """Freeze the host of the last rank for 5 s."""
    host, hit = job.victim(), time.time()
    host.freeze()
    time.sleep(FROZEN)
    host.thaw()
    return {"what": "frozen", "host": host.name, "time": hit, "end": time.time()}


def explains(fault: dict[str, Any], alarm: dict[str, Any]) -> bool:
    """Return whether a fault explains an alarm: a frozen host is silent; a disconnected host is lost with its ranks."""
    if not fault["time"] <= alarm["time"] <= fault["end"] + 1:
        return False
    about = alarm.get("hosts") or [alarm.get("host", fault["host"])]
    if fault["what"] == "frozen":
        return alarm["event"] == "host_silent" and about == [fault["host"]]
    return alarm["event"] != "storage_unavailable" and fault["host"] in about


def table(minutes: int, done: list[dict[str, Any]], alarms: list[dict[str, Any]], *, steps: int, groups: int) -> str:
    """Return a Markdown table with the number of alarms of each kind, with and without a cause."""
    rows: list[dict[str, Any]] = [{"measured": "minutes, steps", "figure": f"{minutes}, {steps}"}]
    for name in ALARMS:
        found = [alarm for alarm in alarms if alarm["event"] == name]
        right = [alarm for alarm in found if any(explains(fault, alarm) for fault in done)]
        figure = f"{len(right)}, {len(found) - len(right)}"
        rows.append({"measured": f"`{name}` with a cause, without", "figure": figure})
    cuts = [fault["lost"] - fault["time"] for fault in done if fault["what"] == "cut"]
    seconds = f"{np.median(cuts):.1f}, {min(cuts):.1f} to {max(cuts):.1f}" if cuts else None
    frozen = len(done) - len(cuts)
    return markdown_table(
        [
            *rows,
            {"measured": f"freezes of {FROZEN:.0f} s, cuts", "figure": f"{frozen}, {len(cuts)}"},
            {"measured": "worker groups, expected", "figure": f"{groups}, {1 + len(cuts)}"},
            {"measured": "seconds from a cut to its report, median, least to most", "figure": seconds},
        ]
    )


if __name__ == "__main__":
    main()
