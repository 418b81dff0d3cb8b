"""Batch inference by Ray Data's `map_batches` with one actor: `-m benchmarks.peers.ray_infer OUT FOLDER`.

The time runs from the actor's first batch to the end of `write_parquet`. CPU time is that of the actor alone.
"""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import ray

from benchmarks.inference.work import Work
from benchmarks.peers.hf_infer import compute, load


class Predictor:
    """The model in an actor."""

    def __init__(self, folder: str, first: str) -> None:
        self._work = Work.model_validate_json(Path(folder, "work.json").read_bytes())
        self._model, self._first, self._cpu = load(Path(folder)), Path(first), Path(f"{first}-cpu")
        self._began = time.process_time()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the results of a batch with its rows."""
        if not self._first.exists():
            self._first.write_text(repr(time.time()))
        rows = [row.tolist() for row in batch["ids"]]
        results = compute(self._model, rows, self._work)
        self._cpu.write_text(repr(time.process_time() - self._began))
        return {"ids": rows, "results": results}


def main() -> None:
    """Compute the results of all rows."""
    out, folder = map(Path, sys.argv[1:])
    work = Work.model_validate_json((folder / "work.json").read_bytes())
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.WARNING)
    first, results = out.with_name("first"), out.with_name("results")
    data = ray.data.read_parquet(str(folder / "rows.parquet"))
    arguments = (str(folder), str(first))
    found = data.map_batches(Predictor, fn_constructor_args=arguments, batch_size=work.batch, concurrency=1, num_cpus=1)
    found.write_parquet(str(results))
    began = float(first.read_text())
    seconds = time.time() - began
    cpu = float(Path(f"{first}-cpu").read_text())
    values = pq.read_table(results)["results"].to_pylist()
    out.write_text(
        json.dumps(
            {"began": began, "seconds": seconds, "cpu_seconds": cpu, "sum": sum(float(sum(one)) for one in values)}
        )
    )


if __name__ == "__main__":
    main()
