"""Overhead of Trainshed's loop per step: alternate steps of the bare FSDP2 loop and Trainshed, in the same processes.

`python -m benchmarks.training.turns [--rounds N] [--quick]`. Start, other load and machine state are the same for both.
Between separate runs they vary more than the loops differ. The overhead of a launcher or a service is not included.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Sample, command_line, compare, markdown_table, pair_record, parse, write_result
from benchmarks.launch import loop_arguments, metrics, run_module
from benchmarks.training.trace import Trace, loss_difference
from benchmarks.workload import TOY, Workload

BARE, OURS = "bare FSDP2 loop", "Trainshed"
RANKS = (1, 2)


def main() -> None:
    """Run both loops on one rank and on two, and write the table."""
    arguments = parse(command_line(__doc__))
    workload = Workload(config=TOY, sequence_length=32, steps=8) if arguments.quick else Workload(steps=36)
    samples: dict[int, list[Sample]] = {ranks: [] for ranks in RANKS}
    for number in range(arguments.rounds):
        for ranks, found in samples.items():
            found += take_turns(workload.model_copy(update={"world": ranks}), number)
            print(f"round {number + 1} of {arguments.rounds}, {ranks} ranks: {[one.value for one in found[-2:]]}")
    write_result(
        "turns",
        settings=workload.model_dump() | {"world": RANKS, "rounds": arguments.rounds, "quick": arguments.quick},
        data=[sample for found in samples.values() for sample in found],
        table=markdown_table([record(ranks, found) for ranks, found in samples.items()]),
        folder=arguments.results,
    )


def take_turns(workload: Workload, number: int) -> list[Sample]:
    """Return the median counted step of both loops in one start, without its last step. Raises ProgramError."""
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        folder, out, run_dir = (Path(root, name) for name in ("workload", "turns.json", "run"))
        workload.write(folder)
        arguments, log = loop_arguments(workload.spec(folder), run_dir)
        run_module("benchmarks.training.turns_run", out, folder, *arguments, log=log, ranks=workload.world)
        bare, ours, losses = zip(*json.loads(out.read_bytes()), strict=True)
        off = loss_difference(Trace.of_metrics(metrics(run_dir)).losses[:-1], losses)

    def sample(name: str, seconds: tuple[float, ...]) -> Sample:
        raw = {"ranks": workload.world, "seconds": seconds, "loss_difference": off}
        return Sample(name, number, float(np.median(seconds[workload.first_counted :])), raw=raw)

    return [sample(BARE, bare), sample(OURS, ours)]


def record(ranks: int, samples: list[Sample]) -> dict[str, Any]:
    """Return a table row."""
    return pair_record(ranks, compare(samples, BARE), (f"{BARE}, seconds a step, median", "Trainshed's loop"))


if __name__ == "__main__":
    main()
