"""Trainshed's loop and the bare loop in the same ranks, one step of each in turn.

`torchrun -m benchmarks.training.turns_run OUT FOLDER SPEC --run-dir DIR`. Rank 0 writes OUT: [seconds of the bare
loop's step, seconds of Trainshed's step, the bare loop's loss] for every step but the last. Trainshed's step is all
work between the rows of two steps, including their read. Python's garbage collection is off in both loops.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

from benchmarks.peers import bare
from benchmarks.workload import Workload
from train_loop import run
from train_loop.data.dataset import Rows
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.plan import MeshPlan
from train_loop.system.exit import leave


def main() -> None:
    """Run the loop, then write the seconds."""
    out, folder = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
    turns: list[tuple[float, float, float]] = []

    def in_turn(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
        rows, steps = local_stream(plan, mesh, rank), bare.steps(Workload.read(folder), folder)
        for _ in range(plan.steps):
            begun = perf_counter()
            loss = next(steps)
            ours = perf_counter()
            yield next(rows)
            turns.append((ours - begun, perf_counter() - ours, loss))

    with patch.object(run, "local_stream", in_turn):
        run.main()
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(turns))


if __name__ == "__main__":
    main()
    leave()
