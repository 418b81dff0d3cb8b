"""Cost of `reproducible: any_size` per step, against the default: steps of both alternate in the same ranks.

`python -m benchmarks.training.ordered [--rounds N] [--quick]`. A step has eight micro-batches on 1, 2 and 4 ranks.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.harness import Sample, command_line, compare, markdown_table, pair_record, parse, write_result
from benchmarks.launch import run_module
from benchmarks.workload import SMALL, TOY, Workload

DEFAULT, ORDERED = "same_size", "any_size"
RANKS, LEAVES = (1, 2, 4), 8


def main() -> None:
    """Measure on each number of ranks, and write the table."""
    arguments = parse(command_line(__doc__))
    config, steps = (TOY, 6) if arguments.quick else (SMALL | {"num_hidden_layers": 4}, 24)
    samples: dict[int, list[Sample]] = {ranks: [] for ranks in RANKS}
    for number in range(arguments.rounds):
        for ranks, found in samples.items():
            found += take_turns(Workload(config=config, sequence_length=128, world=ranks, steps=steps), number)
            print(f"round {number + 1} of {arguments.rounds}, {ranks} ranks: {[one.value for one in found[-2:]]}")
    write_result(
        "ordered",
        settings={"config": config, "steps": steps, "micro_batches": LEAVES, "rounds": arguments.rounds}
        | {"world": RANKS, "quick": arguments.quick},
        data=[sample for found in samples.values() for sample in found],
        table=markdown_table([record(ranks, found) for ranks, found in samples.items()]),
        folder=arguments.results,
    )


def take_turns(workload: Workload, number: int) -> list[Sample]:
    """Return the median counted step of both kinds in one start. Raises ProgramError."""
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        spec = workload.spec(Path(root), training={"global_batch_size": LEAVES})
        file, out = Path(root, "spec.yaml"), Path(root, "seconds.json")
        file.write_text(yaml.safe_dump(spec))
        run_module(
            "benchmarks.training.ordered_run",
            out,
            file,
            workload.steps,
            log=Path(root, "log"),
            ranks=workload.world,
            seconds=600,
        )
        found = json.loads(out.read_bytes())

    def sample(name: str) -> Sample:
        raw = {"ranks": workload.world, "seconds": found[name]}
        return Sample(name, number, float(np.median(found[name][workload.first_counted :])), raw=raw)

    return [sample(DEFAULT), sample(ORDERED)]


def record(ranks: int, samples: list[Sample]) -> dict[str, Any]:
    """Return a table row."""
    return pair_record(ranks, compare(samples, DEFAULT), (f"{DEFAULT}, seconds a step, median", ORDERED))


if __name__ == "__main__":
    main()
