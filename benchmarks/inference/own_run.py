"""A job on one rank, in turns with plain loops: `-m benchmarks.inference.own_run OUT WORK SPEC RUN_DIR`.

After each shard of the job, loops of transformers compute the same rows in this process: in the order of the file, and
by length. Each writes its results. OUT has the seconds of each turn, of wall clock and of this process's CPU time.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq

from benchmarks.inference.work import Work
from benchmarks.peers.hf_infer import compute_all, load
from train_loop import run as program
from train_loop.infer import InferenceLoop
from train_loop.system.exit import leave


class Turns:
    """The turns of the job and of the loops."""

    def __init__(self, folder: Path, here: Path) -> None:
        self.work = Work.model_validate_json((folder / "work.json").read_bytes())
        self._rows = pq.read_table(folder / "rows.parquet")["ids"].to_pylist()
        self._folder, self._here, self._first = folder, here, 0
        self._model: Any = None
        self.turns: dict[str, list[dict[str, float]]] = defaultdict(list)
        self.sum = 0.0
        """Sum of the results of the loop in the order of the file."""
        self.began = 0.0

    def begin(self) -> None:
        """Start the clock of the next turn."""
        self._wall, self._cpu = time.time(), time.process_time()
        self.began = self.began or self._wall

    def end(self, name: str) -> None:
        """End a turn."""
        used = {"seconds": time.time() - self._wall, "cpu_seconds": time.process_time() - self._cpu}
        self.turns[name].append(used)

    def follow(self, done: int) -> None:
        """Compute the rows of the job's last shard by the loops."""
        # After the first shard, so that the start is that of the job alone.
        self._model = self._model or load(self._folder)
        rows, self._first = self._rows[self._first : done], done
        for name, ordered in (("loop", rows), ("sorted", sorted(rows, key=len, reverse=True))):
            self.begin()
            total = compute_all(self._model, ordered, self.work, self._here / f"{name}-{done}.parquet")
            self.end(name)
            self.sum += total if name == "loop" else 0.0


def main() -> None:
    """Run the job."""
    out, folder, spec, run_dir = sys.argv[1:]
    turns, run, commit = Turns(Path(folder), Path(out).parent), InferenceLoop.run, InferenceLoop.commit_if_due

    def timed_run(loop: InferenceLoop) -> Any:
        turns.begin()
        return run(loop)

    def timed_commit(loop: InferenceLoop, before: int) -> None:
        commit(loop, before)
        if loop.done % turns.work.per_shard == 0 or loop.done == turns.work.rows:
            turns.end("ours")
            turns.follow(loop.done)
            turns.begin()

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    sys.argv = ["run", spec, "--run-dir", run_dir]
    with mock.patch.multiple(InferenceLoop, run=timed_run, commit_if_due=timed_commit):
        program.main()
    Path(out).write_text(json.dumps({"began": turns.began, "turns": turns.turns, "sum_of_loop": turns.sum}))


if __name__ == "__main__":
    main()
    leave()
