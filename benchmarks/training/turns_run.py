"""Trainshed's loop and a peer's in the same ranks, one step of each in turn.

`torchrun -m benchmarks.training.turns_run OUT PEER FOLDER SPEC --run-dir DIR`. PEER is a module with `steps`. Every
rank writes OUT.RANK: [seconds of the peer's step and of Trainshed's, CPU seconds of both, the peer's loss] for every
step but the last, and the traffic of both in the last of these, which takes longer. Trainshed's step is all work
between the rows of two steps, including their read. Python's garbage collection is off in both loops.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from unittest.mock import patch

from benchmarks.traffic import Traffic
from benchmarks.workload import Workload
from train_loop import run
from train_loop.data.dataset import Rows
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.plan import MeshPlan
from train_loop.system.exit import leave


def main() -> None:
    """Run the loop, then write the seconds."""
    out, peer, folder = Path(sys.argv.pop(1)), import_module(sys.argv.pop(1)), Path(sys.argv.pop(1))
    turns: list[tuple[float, ...]] = []
    traffic = {"theirs": Traffic(), "ours": Traffic()}

    def in_turn(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
        rows, steps = local_stream(plan, mesh, rank), peer.steps(Workload.read(folder), folder)
        for number in range(plan.steps):
            counted = number == plan.steps - 2
            clocks = [(perf_counter(), process_time())]
            with traffic["theirs"] if counted else nullcontext():
                loss = next(steps)
            clocks.append((perf_counter(), process_time()))
            with traffic["ours"] if counted else nullcontext():
                yield next(rows)
            clocks.append((perf_counter(), process_time()))
            wall, cpu = zip(*clocks, strict=True)
            turns.append((*(later - before for clock in (wall, cpu) for before, later in pairwise(clock)), loss))

    with patch.object(run, "local_stream", in_turn):
        run.main()
    counts = {name: one.counts() for name, one in traffic.items()}
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps({"turns": turns, "traffic": counts}))


if __name__ == "__main__":
    main()
    leave()
