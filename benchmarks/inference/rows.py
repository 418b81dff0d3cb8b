"""Rows/s of inference: Trainshed, plain loops of transformers and Ray Data's `map_batches`, with one thread each.

`python -m benchmarks.inference.rows [--rounds N] [--quick] [--note TEXT]`. Trainshed and the loops share each start:
after each shard of the job, a loop computes the same rows in the order of the file, and one by length. Ratios to loops
are those of each shard. A rate counts all rows from the first batch to the written results, per second of wall clock
and of CPU time. What comes before, such as imports and weights, are a program's seconds of start, measured in starts
of their own. Programs whose results differ have an error in their row.
"""

import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from benchmarks.launch import ProgramError, run_for_json
from benchmarks.workload import SMALL, TOY
from train_loop.data.read_results import read_rows
from train_loop.run_dir import RunDir

OURS, LOOP, RAY = "Trainshed", "transformers in a loop", "Ray Data `map_batches`"
SORTED = "transformers in a loop, rows of each shard by length"
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
    samples = dict[str, list[Sample]]()
    for work in works:
        with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-", ignore_cleanup_errors=True) as root:
            work.write(Path(root, "work"))
            samples[work.output] = interleave(programs(Path(root)), arguments.rounds)
    write_result(
        "inference",
        settings={work.output: work.model_dump() for work in works}
        | {"rounds": arguments.rounds, "quick": arguments.quick, "note": arguments.note},
        data=[asdict(one) | {"output": output} for output, found in samples.items() for one in found],
        table=table(samples, works),
        folder=arguments.results,
    )


def programs(root: Path) -> dict[str, functools.partial[Measured]]:
    """Return the programs; each call is one start. That of the loop has no own rate."""
    return {
        OURS: functools.partial(one_run, root, ours),
        LOOP: functools.partial(one_run, root, functools.partial(peer, "benchmarks.peers.hf_infer")),
        RAY: functools.partial(one_run, root, functools.partial(peer, "benchmarks.peers.ray_infer")),
    }


def one_run(root: Path, program: Callable[[Work, Path, Path], dict[str, Any]]) -> Measured:
    """Return the rows/s of one program, and all that it reports. Raises ProgramError."""
    work = Work.model_validate_json((root / "work" / "work.json").read_bytes())
    launched, load = time.time(), os.getloadavg()
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as here:
        found = program(work, root / "work", Path(here))
    more = {"start_seconds": found["began"] - launched, "load_average": load}
    return Measured(work.rows / found.get("seconds", math.inf), found | more)


def peer(module: str, work: Work, folder: Path, here: Path) -> dict[str, Any]:
    """Run another program."""
    found: dict[str, Any] = run_for_json(module, folder, here=here)
    return found


def ours(work: Work, folder: Path, here: Path) -> dict[str, Any]:
    """Run a job without the service on one rank, in turns with the loops. Raises ProgramError if results differ."""
    file, run_dir = here / "spec.yaml", RunDir(here / "run")
    file.write_text(yaml.safe_dump(work.spec(folder)))
    found: dict[str, Any] = run_for_json("benchmarks.inference.own_run", folder, file, run_dir.root, here=here)
    column = "logprobs" if work.output == LOGPROBS else "generated_tokens"
    total, expected = sum(float(sum(row[column])) for row in read_rows(run_dir)), found["sum_of_loop"]
    if not abs(total - expected) <= _TOLERANCE * abs(expected):
        raise ProgramError(f"the sum of its results is {total}; that of the loop is {expected}")
    return found | {"sum": total, "seconds": sum(turn["seconds"] for turn in found["turns"]["ours"])}


def shards_of(samples: Sequence[Sample], work: Work, clock: str) -> list[Sample]:
    """Return the rows/s of each shard as a sample, by a clock; Ray Data has the same rate for all shards of a round.

    Programs that failed keep their errors.
    """
    found = [one for one in samples if one.error]
    for mine in samples:
        if mine.error or mine.variant != OURS:
            continue
        theirs = [one for one in samples if one.variant == RAY and one.round == mine.round and not one.error]
        for number in range(len(mine.raw["turns"]["ours"])):
            rows = min(work.per_shard, work.rows - number * work.per_shard)
            place = mine.round * 1000 + number
            for name, variant in (("ours", OURS), ("loop", LOOP), ("sorted", SORTED)):
                found.append(Sample(variant, place, rows / mine.raw["turns"][name][number][clock]))
            found += [Sample(RAY, place, work.rows / one.raw[clock]) for one in theirs]
    return found


def table(samples: Mapping[str, Sequence[Sample]], works: Sequence[Work]) -> str:
    """Return a Markdown table of rows/s by output, with Trainshed's ratio to each program."""
    records = []
    for work in works:
        mine = samples[work.output]
        by_wall, by_cpu = shards_of(mine, work, "seconds"), shards_of(mine, work, "cpu_seconds")
        starts = {row.variant: row.median for row in compare(taken(mine, "start_seconds"), LOOP)}
        ratios, of_cpu = ratios_of(OURS, by_wall), ratios_of(OURS, by_cpu)
        records += [
            {
                "output": work.output,
                "program": row.variant,
                "rows/s, median": row.error if row.median is None else f"{row.median:.2f}",
                "Trainshed's ÷ its, median [95 % interval]": ratios.get(row.variant),
                "the same per CPU second": of_cpu.get(row.variant),
                "start, s, median": f"{start:.1f}" if (start := starts.get(row.variant)) else None,
            }
            for row in compare(by_wall, LOOP)
        ]
    return markdown_table(records)


if __name__ == "__main__":
    main()
