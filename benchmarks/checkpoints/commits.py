"""Speed in MB/s of durable checkpoints: Trainshed, with hashes and a commit, against DCP, which syncs its files.

`python -m benchmarks.checkpoints.commits [--rounds N] [--quick]`. Two ranks repeatedly save a model and its optimizer,
without training in between. The time runs from the call until all data is on disk.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.checkpoints.reshard import LARGE
from benchmarks.checkpoints.saves_run import WAYS
from benchmarks.harness import Measured, command_line, compare, interleave, parse, ratio_table, write_result
from benchmarks.launch import run_for_json
from benchmarks.workload import TOY, Workload

PLAIN = "dcp.save"


def main() -> None:
    """Run the comparison and write its table."""
    arguments = parse(command_line(__doc__))
    config = TOY if arguments.quick else LARGE
    workload = Workload(config=config, sequence_length=32, steps=1)
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        workload.write(Path(root, "workload"))
        ways = (
            [PLAIN, "Trainshed, thread"] if arguments.quick else [PLAIN, *(way for way in WAYS if "Trainshed" in way)]
        )
        programs = {name: functools.partial(committed, workload, Path(root), name) for name in ways}
        samples = interleave(programs, arguments.rounds)
    write_result(
        "commits",
        settings=workload.model_dump() | {"rounds": arguments.rounds, "quick": arguments.quick},
        data=samples,
        table=ratio_table(compare(samples, PLAIN), what="MB/s", baseline=PLAIN),
        folder=arguments.results,
    )


def committed(workload: Workload, root: Path, name: str) -> Measured:
    """Return the median MB/s of a start. Raises ProgramError."""
    with tempfile.TemporaryDirectory(dir=root) as here:
        speeds = run_for_json(
            "benchmarks.checkpoints.commits_run", root / "workload", name, here=Path(here), ranks=workload.world
        )
    return Measured(float(np.median(speeds)), {"speeds": speeds})


if __name__ == "__main__":
    main()
