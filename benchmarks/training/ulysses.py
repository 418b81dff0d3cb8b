"""Cost of sequence parallelism: the same tokens on two ranks, with one sequence per rank or with Ulysses.

`python -m benchmarks.training.ulysses [--rounds N] [--quick]`. It measures seconds per optimizer step, and the share of
a step in all-to-alls.
"""

import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    Measured,
    Row,
    Sample,
    command_line,
    compare,
    interleave,
    markdown_table,
    parse,
    write_result,
)
from benchmarks.launch import loop_arguments, metrics, run_module
from benchmarks.training.trace import Trace, measure
from benchmarks.workload import TOY, Workload

BASELINE = "sp 1: one sequence a rank"
VARIANTS: dict[str, dict[str, int]] = {
    BASELINE: {"ulysses_size": 1, "rows": 1},
    "sp 2: two sequences at once, half of each a rank": {"ulysses_size": 2, "rows": 2},
    "sp 2: two sequences one after the other": {"ulysses_size": 2, "rows": 1},
}


def main() -> None:
    """Run the comparison and write its table."""
    arguments = parse(command_line(__doc__))
    toy = Workload(config=TOY, sequence_length=32, steps=8)
    workload = toy if arguments.quick else Workload(sequence_length=1024)
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        workload.write(Path(root, "workload"))
        runs = {name: functools.partial(one_run, workload, Path(root), **how) for name, how in VARIANTS.items()}
        samples = interleave(runs, arguments.rounds)
    write_result(
        "ulysses",
        settings=workload.model_dump() | {"rounds": arguments.rounds, "quick": arguments.quick},
        data=samples,
        table=table(compare(samples, BASELINE), samples),
        folder=arguments.results,
    )


def one_run(workload: Workload, root: Path, *, ulysses_size: int, rows: int) -> Measured:
    """Run Trainshed's loop on the workload; all variants use the same samples per step. Raises ProgramError."""
    here = Path(tempfile.mkdtemp(dir=root))
    training = {
        "per_device_train_batch_size": rows,
        "global_batch_size": workload.global_batch,
    }
    spec = workload.spec(root / "workload", strategy={"ulysses_size": ulysses_size}, training=training)
    arguments, log = loop_arguments(spec, here / "run")
    run_module("benchmarks.training.stopwatch_run", here / "exchanges", *arguments, log=log, ranks=workload.world)
    trace = Trace.of_metrics(metrics(here / "run"))
    measured = measure(trace, workload, root / "first.json")
    share = exchange_share(trace, workload.first_counted, list(here.glob("exchanges.*")))
    shutil.rmtree(here)
    return Measured(measured.value, measured.raw | {"all_to_all_share": share})


def exchange_share(trace: Trace, first: int, files: Sequence[Path]) -> float:
    """Return the share of the counted window in all-to-alls, as a mean over ranks."""
    begin, end = trace.ends[first - 1], trace.ends[-1]
    spent = [sum(took for at, took in json.loads(file.read_bytes()) if begin < at <= end) for file in files]
    return float(np.mean(spent)) / (end - begin)


def table(rows: Sequence[Row], samples: Sequence[Sample]) -> str:
    """Return a Markdown table with the ratio to sp 1 and the share in all-to-alls."""
    records: list[dict[str, Any]] = []
    for row in rows:
        shares = [s.raw["all_to_all_share"] for s in samples if s.variant == row.variant and s.value is not None]
        records.append(
            {
                "two ranks, the same tokens": row.variant,
                "seconds a step, median": None if row.median is None else f"{row.median:.4f}",
                "ratio, median [95 % interval]": row.ratio_text,
                "of it in all-to-alls": f"{np.median(shares):.1%}" if shares else None,
            }
        )
    return markdown_table(records)


if __name__ == "__main__":
    main()
