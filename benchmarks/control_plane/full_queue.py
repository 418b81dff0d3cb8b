"""Cost of 10,000 queued jobs: response times, memory of the service, and a pass of the reconciler.

`python -m benchmarks.control_plane.full_queue [--rounds N] [--quick]`. A service on SQLite whose cluster does not
answer has 100 or 10,000 jobs in its queue, alternately. One connection requests single jobs and pages of 50 while the
reconciler runs.
"""

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.control_plane.accepts import service_of, spec, waiting_service
from benchmarks.harness import (
    Measured,
    Sample,
    command_line,
    compare,
    interleave,
    markdown_table,
    parse,
    taken,
    write_result,
)
from benchmarks.launch import run_for_json
from service.adapters.sql.database import open_database
from service.adapters.sql.store import SqlJobStore
from service.adapters.storage.run_dirs import LocalRunDirs
from service.domain.jobs.decision import Retry
from service.domain.jobs.job import Job
from service.ports import JobQuery, NewJob
from service.use_cases.jobs.reconcile import Reconciler, ReconcileTimings
from tests.support.fakes.stores import MemoryCluster
from train_loop.spec import parse_text

FEW = "100 jobs"
GETS, PAGES, PASSES = 1000, 300, 10
PARTS = {
    "get_p99": "GET, p99, ms",
    "page_p99": "page of 50, p99, ms",
    "quiet_pass": "pass of the reconciler, ms",
    "changed_pass": "pass after a change, ms",
    "bytes_per_job": "bytes per job",
}


def main() -> None:
    """Run the comparison and write its table."""
    arguments = parse(command_line(__doc__))
    many = 300 if arguments.quick else 10_000
    names = {FEW: 100, f"{many:,} jobs": many}
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:

        def measured(count: int) -> Measured:
            with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as here:
                return measure(Path(here), count, quick=arguments.quick)

        ways: dict[str, Callable[[], Measured]] = {
            name: functools.partial(measured, count) for name, count in names.items()
        }
        samples = interleave(ways, arguments.rounds)
        supervisors = run_for_json("benchmarks.control_plane.accepts_ray", 4, here=Path(root))["supervisor_bytes"]
    write_result(
        "full-queue",
        settings={"rounds": arguments.rounds, "quick": arguments.quick, "gets": GETS, "pages": PAGES},
        data=[*samples, {"supervisor_bytes": supervisors}],
        table=markdown_table(records(samples, list(names), supervisors)),
        folder=arguments.results,
    )


def records(samples: list[Sample], names: Sequence[str], supervisors: Sequence[int]) -> list[dict[str, Any]]:
    """Return a table row for each measure, and one for the memory of Ray's job API per job."""
    table = []
    for part, title in PARTS.items():
        rows = {row.variant: row for row in compare(taken(samples, part), FEW)}
        few, many = (rows[name] for name in names)
        per_job = part == "bytes_per_job"
        table.append(
            {
                "what": title,
                names[0]: None if per_job or few.median is None else f"{few.median:.2f}",
                names[1]: many.median and (f"{many.median:,.0f}" if per_job else f"{many.median:.2f}"),
                "ratio, median [95 % interval]": None if per_job else many.ratio_text,
            }
        )
    memory = f"{np.median(supervisors):,.0f}" if supervisors else None
    return [*table, {"what": "bytes of Ray's supervisor of one job (USS)", names[1]: memory}]


def measure(here: Path, count: int, *, quick: bool) -> Measured:
    """Measure one start with `count` jobs in the queue."""
    gets, pages = (100, 20) if quick else (GETS, PAGES)
    with waiting_service(here):
        # The first start creates the database and other files.
        bare = settled_memory(here)
    ids = fill(here, count)
    with waiting_service(here) as (client, _):
        chosen = itertools.islice(itertools.cycle(np.random.default_rng(0).permutation(ids).tolist()), gets)
        found = {
            "get_p99": p99(client.job, chosen),
            "page_p99": p99(lambda after: client.jobs(after=after, limit=50), places(ids, pages)),
            "bytes_per_job": (settled_memory(here) - bare) / count,
        }
    found |= passes(here)
    return Measured(found["get_p99"], found)


def places(ids: Sequence[str], pages: int) -> list[str]:
    """Return cursors spread over the whole list."""
    chosen = np.linspace(min(50, len(ids) - 1), len(ids) - 1, pages).astype(int)
    return [ids[place] for place in chosen]


def fill(here: Path, count: int) -> list[str]:
    """Insert jobs into the database of the stopped service; return their ids."""
    engine = open_database(f"sqlite:///{here / 'trainshed.db'}")
    store, job_spec = SqlJobStore(engine), parse_text(spec(here).read_bytes())
    jobs = [
        Job(
            f"job-{number:08d}",
            job_spec,
            f"{here.as_uri()}/runs/default/job-{number:08d}",
            created_at=1.0,
            updated_at=1.0,
        )
        for number in range(count)
    ]
    for job in jobs:
        store.add(NewJob(job))
    engine.dispose()
    return [job.id for job in jobs]


def p99(call: Callable[[str], object], arguments: Any) -> float:
    """Return the 99th percentile of the calls' milliseconds; the first ten calls warm up."""
    seconds = []
    for argument in arguments:
        began = time.perf_counter()
        call(argument)
        seconds.append(time.perf_counter() - began)
    return float(np.quantile(seconds[10:], 0.99) * 1000)


def settled_memory(home: Path) -> int:
    """Return the USS bytes of the service after some passes of its reconciler."""
    time.sleep(3)
    return int(service_of(home).memory_full_info().uss)


def passes(here: Path) -> dict[str, float]:
    """Return the milliseconds of a reconciler pass over the same database, without and after a change."""
    engine = open_database(f"sqlite:///{here / 'trainshed.db'}")
    store = SqlJobStore(engine)
    reconciler = Reconciler(
        store,
        MemoryCluster({"CPU": 0.5}),
        LocalRunDirs(),
        time.time,
        "benchmark",
        ReconcileTimings(30.0, Retry(1.0, 1.0)),
    )
    quiet, changed = list[float](), list[float]()
    (job,) = store.page(JobQuery(limit=1))
    for _ in range(PASSES):
        quiet.append(_seconds(reconciler.run_once))
        job = replace(job, updated_at=job.updated_at + 1)
        store.save(job)
        job = replace(job, version=job.version + 1)
        changed.append(_seconds(reconciler.run_once))
    engine.dispose()
    return {"quiet_pass": float(np.median(quiet[1:]) * 1000), "changed_pass": float(np.median(changed) * 1000)}


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
