"""Cost of open streams: memory of the service per stream, its idle CPU, and the delay of a line.

`python -m benchmarks.control_plane.open_streams [--rounds N] [--quick]`. Each client follows the events of one job as
server-sent events. Then a line is written for each job, and every client records its arrival.
"""

import asyncio
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.control_plane.accepts import service_of, waiting_service
from benchmarks.control_plane.full_queue import fill, settled_memory
from benchmarks.harness import Measured, Sample, command_line, interleave, markdown_table, parse, write_result
from train_loop.run_dir import JsonLines, RunDir

JOBS, LINES = 10, 5
IDLE = 5.0
"""Seconds over which the idle CPU of the service is measured."""
LATE = 30.0


def main() -> None:
    """Measure several numbers of streams, and write the table."""
    arguments = parse(command_line(__doc__), rounds=3)
    counts = (5, 20) if arguments.quick else (10, 100, 1000)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def measured(count: int) -> Measured:
        with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as here:
            return measure(Path(here), count)

    ways = {f"{count:,} streams": (lambda count=count: measured(count)) for count in counts}
    samples = interleave(ways, arguments.rounds)
    write_result(
        "open-streams",
        settings={"rounds": arguments.rounds, "quick": arguments.quick, "jobs": JOBS, "idle_seconds": IDLE},
        data=samples,
        table=markdown_table([record(name, samples) for name in ways]),
        folder=arguments.results,
    )


def record(name: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return a table row."""
    mine = [sample.raw for sample in samples if sample.variant == name and sample.value is not None]
    median = {key: float(np.median([raw[key] for raw in mine])) for key in (mine[0] if mine else {})}
    errors = {sample.error for sample in samples if sample.variant == name and sample.error}
    return {
        "open": name,
        "kB per stream": f"{median['bytes_per_stream'] / 1000:.0f}" if mine else "; ".join(errors),
        "CPU of the service while nothing is written": f"{median['idle_cpu']:.0%}" if mine else None,
        "a line is there after, median": f"{median['median_late']:.2f} s" if mine else None,
        "the last of them": f"{median['most_late']:.2f} s" if mine else None,
    }


def measure(here: Path, count: int) -> Measured:
    """Measure one start with `count` streams."""
    with waiting_service(here):
        ids = fill(here, JOBS)
    files = [RunDir(here / "runs" / "default" / job_id).attempt(1).events for job_id in ids]
    for file in files:
        JsonLines(file, attempt=1).append(event="attempt_started")
    with waiting_service(here) as (client, url):
        client.jobs()
        bare = settled_memory(here)
        key = (here / "admin.key").read_text().strip()
        found = asyncio.run(follow(here, url, key, ids, files, count, bare))
    return Measured(found["bytes_per_stream"], found)


async def follow(
    here: Path, url: str, key: str, ids: Sequence[str], files: Sequence[Path], count: int, bare: int
) -> dict[str, float]:
    """Open the streams, measure the service, write lines, and record their delays in each stream."""
    host, _, port = url.removeprefix("http://").partition(":")
    readers = []
    for number in range(count):
        reader, writer = await asyncio.open_connection(host, int(port))
        path = f"/jobs/{ids[number % len(ids)]}/events"
        request_lines = [
            f"GET {path} HTTP/1.1",
            f"Host: {host}",
            f"Authorization: Bearer {key}",
            "Accept: text/event-stream",
        ]
        writer.write("\r\n".join([*request_lines, "", ""]).encode())
        readers.append((reader, writer))
    await asyncio.gather(*(reader.readuntil(b"attempt_started") for reader, _ in readers))
    await asyncio.sleep(3)
    process = psutil.Process(service_of(here).pid)
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(IDLE)
    idle = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
    grown = process.memory_full_info().uss - bare
    late = list[float]()
    for line in range(LINES):
        for file in files:
            JsonLines(file, attempt=1).append(event="line", number=line)
        written, mark = time.monotonic(), f'"number": {line}'.encode()
        late += await asyncio.wait_for(asyncio.gather(*(_seen(reader, mark, written) for reader, _ in readers)), LATE)
    for _, writer in readers:
        writer.close()
    return {
        "bytes_per_stream": grown / count,
        "idle_cpu": idle,
        "median_late": float(np.median(late)),
        "most_late": max(late),
    }


async def _seen(reader: asyncio.StreamReader, mark: bytes, written: float) -> float:
    """Return the seconds until a stream has received a line."""
    await reader.readuntil(mark)
    return time.monotonic() - written


if __name__ == "__main__":
    main()
