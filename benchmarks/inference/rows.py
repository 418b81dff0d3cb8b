"""Rows/s of inference: Trainshed, plain loops of transformers and Ray Data's `map_batches`, on one process each.

`python -m benchmarks.inference.rows [--rounds N] [--quick] [--note TEXT]`. Every run is a separate start with one
thread. Its rate counts all rows from the first batch to the durable results. What comes before, such as imports and
weights, are its seconds of start, which count from the start of the process. One loop reads rows in the order of the
file; the other sorts all of them by length before it begins, and shares the start of the first. Programs whose results
differ from the loop's have an error in their row.
"""

import functools
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from benchmarks.harness import (
    Measured,
    Sample,
    command_line,
    compare,
    interleave,
    markdown_table,
    parse,
    ratios_of,
    taken,
    write_result,
)
from benchmarks.inference.work import GENERATE, LOGPROBS, Work
from benchmarks.launch import ProgramError, run_for_json, run_module
from benchmarks.workload import SMALL, TOY
from train_loop.data.read_results import read_rows
from train_loop.run_dir import RunDir, read_lines

OURS, LOOP, RAY = "Trainshed", "transformers in a loop", "Ray Data `map_batches`"
SORTED = "transformers in a loop, rows sorted by length"
_TOLERANCE = 1e-3
"""Largest relative difference of the sums of results."""


def main() -> None:
    """Run the comparison and write its table."""
    parser = command_line(__doc__)
    parser.add_argument("--note", help="text for the raw data, such as other load of the machine")
    arguments = parse(parser, rounds=5)
    small = {"config": TOY, "rows": 12, "longest": 24, "batch": 4, "new_tokens": 6, "per_shard": 8}
    sizes = small if arguments.quick else {"config": SMALL}
    works = [Work(output=output, **sizes) for output in (LOGPROBS, GENERATE)]
    samples = list[Sample]()
    for work in works:
        with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-", ignore_cleanup_errors=True) as root:
            work.write(Path(root, "work"))
            found = with_sorted(interleave(programs(Path(root)), arguments.rounds), work.rows)
        samples += [replace(one, variant=f"{work.output}: {one.variant}") for one in found]
    write_result(
        "inference",
        settings={work.output: work.model_dump() for work in works}
        | {"rounds": arguments.rounds, "quick": arguments.quick, "note": arguments.note},
        data=samples,
        table=table(samples),
        folder=arguments.results,
    )


def programs(root: Path) -> dict[str, functools.partial[Measured]]:
    """Return the compared programs; each call is one start."""
    return {
        LOOP: functools.partial(one_run, root, "benchmarks.peers.hf_infer"),
        OURS: functools.partial(one_run, root, None),
        RAY: functools.partial(one_run, root, "benchmarks.peers.ray_infer"),
    }


def one_run(root: Path, module: str | None) -> Measured:
    """Return the rows/s of one program. Raises ProgramError, also if its results differ from the first program's."""
    work = Work.model_validate_json((root / "work" / "work.json").read_bytes())
    launched, load = time.time(), os.getloadavg()
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as here:
        if module is None:
            found = ours(work, root / "work", Path(here))
        else:
            found = run_for_json(module, root / "work", here=Path(here))
    reference = root / "sum"
    if not reference.exists():
        reference.write_text(repr(found["sum"]))
    expected = float(reference.read_text())
    if not abs(found["sum"] - expected) <= _TOLERANCE * abs(expected):
        raise ProgramError(f"the sum of its results is {found['sum']}; expected {expected}")
    more = {"start_seconds": found["began"] - launched, "load_average": load}
    return Measured(work.rows / found["seconds"], found | more)


def with_sorted(samples: Sequence[Sample], rows: int) -> list[Sample]:
    """Return samples with those of the sorted loop, which shares each start of the other loop."""
    found = list[Sample]()
    for one in samples:
        found.append(one)
        if one.variant == LOOP:
            value = None if one.error else rows / one.raw["sorted_seconds"]
            found.append(replace(one, variant=SORTED, value=value, raw={"shares_start": True}))
    return found


def ours(work: Work, folder: Path, here: Path) -> dict[str, float]:
    """Run a job without the service on one rank; return its seconds, and the sum of its results."""
    file, run_dir = here / "spec.yaml", RunDir(here / "run")
    file.write_text(yaml.safe_dump(work.spec(folder)))
    run_module("train_loop.run", file, "--run-dir", run_dir.root, log=here / "log", ranks=1)
    attempt = run_dir.attempt(1)
    times = {line["event"]: line["time"] for line in read_lines(attempt.events)}
    first = next(iter(read_lines(attempt.metrics)))
    # A line has the seconds of a row of its batch, and the number of rows so far.
    began = first["time"] - first["step_seconds"] * first["step"]
    column = "logprobs" if work.output == LOGPROBS else "generated_tokens"
    total = sum(float(sum(row[column])) for row in read_rows(run_dir))
    return {"began": began, "seconds": times["work_ended"] - began, "sum": total}


def table(samples: Sequence[Sample]) -> str:
    """Return a Markdown table of rows/s by output, with Trainshed's ratio to each program."""
    records = []
    for output in (LOGPROBS, GENERATE):
        of_output = [
            replace(one, variant=one.variant.removeprefix(f"{output}: "))
            for one in samples
            if one.variant.startswith(f"{output}: ")
        ]
        ratios = ratios_of(OURS, of_output)
        starts = {row.variant: row for row in compare(taken(of_output, "start_seconds"), LOOP)}
        records += [
            {
                "output": output,
                "program": row.variant,
                "rows/s, median": row.error if row.median is None else f"{row.median:.2f}",
                "Trainshed's ÷ its, median [95 % interval]": ratios.get(row.variant),
                "start, s, median": None if starts[row.variant].median is None else f"{starts[row.variant].median:.1f}",
            }
            for row in compare(of_output, LOOP)
        ]
    return markdown_table(records)


if __name__ == "__main__":
    main()
