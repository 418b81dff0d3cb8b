"""Overhead of Trainshed's loop per step: alternate steps of the bare FSDP2 loop and Trainshed, in the same processes.

`python -m benchmarks.training.turns [--rounds N] [--quick]`. Start, other load and machine state are the same for both.
Between separate runs they vary more than the loops differ. The overhead of a launcher or a service is not included.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Sample, command_line, compare, markdown_table, pair_record, parse, write_result
from benchmarks.launch import loop_arguments, metrics, run_module
from benchmarks.training.trace import Trace, loss_difference
from benchmarks.workload import TOY, Workload

BARE, OURS = "bare FSDP2 loop", "Trainshed"
RANKS = (1, 2)


class Turns(NamedTuple):
    """Steps of both loops in one start."""

    theirs: tuple[float, ...]
    """Seconds of each step."""
    ours: tuple[float, ...]
    their_cpu: tuple[float, ...]
    """CPU seconds of each step of rank 0."""
    our_cpu: tuple[float, ...]
    loss_difference: float
    traffic: list[dict[str, Any]]
    """What `Traffic` counted in a step of each loop, by rank."""


def main() -> None:
    """Run both loops on one rank and on two, and write the table."""
    arguments = parse(command_line(__doc__))
    workload = Workload(config=TOY, sequence_length=32, steps=8) if arguments.quick else Workload(steps=36)
    samples: dict[int, list[Sample]] = {ranks: [] for ranks in RANKS}
    for number in range(arguments.rounds):
        for ranks, found in samples.items():
            found += both(workload.model_copy(update={"world": ranks}), number)
            print(f"round {number + 1} of {arguments.rounds}, {ranks} ranks: {[one.value for one in found[-2:]]}")
    write_result(
        "turns",
        settings=workload.model_dump() | {"world": RANKS, "rounds": arguments.rounds, "quick": arguments.quick},
        data=[sample for found in samples.values() for sample in found],
        table=markdown_table([record(ranks, found) for ranks, found in samples.items()]),
        folder=arguments.results,
    )


def both(workload: Workload, number: int) -> list[Sample]:
    """Return the median counted step of both loops in one start. Raises ProgramError."""
    turns = take_turns(workload, "benchmarks.peers.bare")

    def sample(name: str, seconds: tuple[float, ...]) -> Sample:
        raw = {"ranks": workload.world, "seconds": seconds, "loss_difference": turns.loss_difference}
        return Sample(name, number, median(workload, seconds), raw=raw)

    return [sample(BARE, turns.theirs), sample(OURS, turns.ours)]


def take_turns(workload: Workload, peer: str) -> Turns:
    """Run both loops in one start, without their last step; `peer` is the other's module. Raises ProgramError."""
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        folder, out, run_dir = (Path(root, name) for name in ("workload", "turns", "run"))
        workload.write(folder)
        arguments, log = loop_arguments(workload.spec(folder), run_dir)
        run_module("benchmarks.training.turns_run", out, peer, folder, *arguments, log=log, ranks=workload.world)
        ranks = [json.loads(Path(f"{out}.{rank}").read_bytes()) for rank in range(workload.world)]
        theirs, ours, their_cpu, our_cpu, losses = zip(*ranks[0]["turns"], strict=True)
        off = loss_difference(Trace.of_metrics(metrics(run_dir)).losses[:-1], losses)
    return Turns(theirs, ours, their_cpu, our_cpu, off, [rank["traffic"] for rank in ranks])


def median(workload: Workload, seconds: tuple[float, ...]) -> float:
    """Return the median step, without warm-up and the step whose traffic was counted."""
    return float(np.median(seconds[workload.first_counted : -1]))


def record(ranks: int, samples: list[Sample]) -> dict[str, Any]:
    """Return a table row."""
    return pair_record(ranks, compare(samples, BARE), (f"{BARE}, seconds a step, median", "Trainshed's loop"))


if __name__ == "__main__":
    main()
