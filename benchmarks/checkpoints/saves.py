"""Time that a durable save adds to a run: Trainshed, plain DCP, Hugging Face's Trainer and Fabric.

`python -m benchmarks.checkpoints.saves [--rounds N] [--quick]`. Each start alternates blocks of steps with and without
saves. A block ends when all its saves are durable.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.checkpoints.blocks import STEPS
from benchmarks.checkpoints.saves_run import WAYS
from benchmarks.harness import Measured, command_line, interleave, markdown_table, parse, ratios_of, write_result
from benchmarks.launch import run_for_json
from benchmarks.workload import TOY, Workload

PEERS = {
    "Hugging Face Trainer, Accelerate FSDP2": "benchmarks.peers.hf_saves",
    "Lightning Fabric FSDP2": "benchmarks.peers.fabric_saves",
}
OURS = "Trainshed, thread"


def main() -> None:
    """Run the comparison and write its table."""
    arguments = parse(command_line(__doc__))
    toy = Workload(config=TOY, sequence_length=32, steps=STEPS)
    workload = toy if arguments.quick else Workload(sequence_length=128, steps=STEPS)
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        workload.write(Path(root, "workload"))
        programs = {name: functools.partial(saved, workload, Path(root), name) for name in [*WAYS, *PEERS]}
        samples = interleave(programs, arguments.rounds)
    write_result(
        "saves",
        settings=workload.model_dump() | {"rounds": arguments.rounds, "quick": arguments.quick},
        data=samples,
        table=markdown_table(
            [
                {
                    "program": name,
                    "seconds that a save adds, median": f"{np.median(found):.3f}" if found else None,
                    f"{OURS} ÷ it, median [95 % interval]": ratios_of(OURS, samples).get(name),
                    "error": next((one.error for one in samples if one.variant == name and one.error), None),
                }
                for name in programs
                for found in [[one.value for one in samples if one.variant == name and one.value is not None]]
            ]
        ),
        folder=arguments.results,
    )


def saved(workload: Workload, root: Path, name: str) -> Measured:
    """Return the mean seconds that a save has added, over a start's pairs of blocks. Raises ProgramError."""
    module, rest = (PEERS[name], ()) if name in PEERS else ("benchmarks.checkpoints.saves_run", (name,))
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as here:
        added = run_for_json(module, root / "workload", *rest, here=Path(here), ranks=workload.world)
    return Measured(float(np.mean(added)), {"added": added})


if __name__ == "__main__":
    main()
