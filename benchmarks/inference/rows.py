"""Rows/s of inference: Trainshed, a plain loop of transformers and Ray Data's `map_batches`, on one process each.

`python -m benchmarks.inference.rows [--rounds N] [--quick]`. Every run is a separate start. Its time runs from the
first batch to the durable results, without imports and the loading of weights. Programs whose results differ from the
loop's have an error in their row. Trainshed keeps weights gathered, as the others have them.
"""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from pydantic import BaseModel, ConfigDict
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import (
    Measured,
    Sample,
    command_line,
    compare,
    interleave,
    markdown_table,
    parse,
    ratios_of,
    write_result,
)
from benchmarks.launch import ProgramError, run_for_json, run_module
from benchmarks.workload import SMALL, TOY
from train_loop.data.read_results import read_rows
from train_loop.run_dir import RunDir, read_lines

OURS, LOOP, RAY = "Trainshed", "transformers in a loop", "Ray Data `map_batches`"
LOGPROBS, GENERATE = "logprobs", "generate"
_TOLERANCE = 1e-3
"""Largest relative difference of the sums of results."""


class Work(BaseModel):
    """The rows of a comparison, and the output for each."""

    model_config = ConfigDict(frozen=True)

    output: str
    config: dict[str, Any] = SMALL
    rows: int = 96
    longest: int = 256
    batch: int = 8
    new_tokens: int = 64

    def write(self, folder: Path) -> None:
        """Write a model, rows of uneven lengths, and this workload."""
        folder.mkdir()
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config)).save_pretrained(folder / "model")
        draw = np.random.default_rng(0)
        lengths = draw.integers(self.longest // 4, self.longest, self.rows, endpoint=True)
        ids = [draw.integers(0, self.config["vocab_size"], size).tolist() for size in lengths]
        pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))}), folder / "rows.parquet")
        (folder / "work.json").write_text(self.model_dump_json())

    def spec(self, folder: Path) -> dict[str, Any]:
        """Return the workload as a job of one worker."""
        generation = {"max_new_tokens": self.new_tokens, "stop_tokens": []}
        return {
            "name": "benchmark",
            "kind": "infer",
            "model": {"path": str(folder / "model"), "dtype": "fp32"},
            "data": {
                "train": {"path": str(folder / "rows.parquet")},
                "columns": {"input_ids": "ids"},
                "sequence_length": self.longest,
            },
            "infer": {"output": self.output, "batch_size": self.batch}
            | ({"generation": generation} if self.output == GENERATE else {}),
            "strategy": {"reshard_after_forward": False},
            "scaling": {"num_workers": 1},
        }


def main() -> None:
    """Run the comparison and write its table."""
    arguments = parse(command_line(__doc__))
    toy = {"config": TOY, "rows": 12, "longest": 24, "batch": 4, "new_tokens": 6} if arguments.quick else {}
    works = [Work(output=output, **toy) for output in (LOGPROBS, GENERATE)]
    samples = list[Sample]()
    for work in works:
        with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-", ignore_cleanup_errors=True) as root:
            work.write(Path(root, "work"))
            found = interleave(programs(Path(root)), arguments.rounds)
        samples += [replace(one, variant=f"{work.output}: {one.variant}") for one in found]
    write_result(
        "infer-rows",
        settings={work.output: work.model_dump() for work in works}
        | {"rounds": arguments.rounds, "quick": arguments.quick},
        data=samples,
        table=table(samples),
        folder=arguments.results,
    )


def programs(root: Path) -> dict[str, functools.partial[Measured]]:
    """Return the compared programs; each call is one start."""
    return {
        LOOP: functools.partial(one_run, root, "benchmarks.peers.hf_infer"),
        OURS: functools.partial(one_run, root, None),
        RAY: functools.partial(one_run, root, "benchmarks.peers.ray_infer"),
    }


def one_run(root: Path, module: str | None) -> Measured:
    """Return the rows/s of one program. Raises ProgramError, also if its results differ from the first program's."""
    work = Work.model_validate_json((root / "work" / "work.json").read_bytes())
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as here:
        if module is None:
            found = ours(work, root / "work", Path(here))
        else:
            found = run_for_json(module, root / "work", here=Path(here))
    reference = root / "sum"
    if not reference.exists():
        reference.write_text(repr(found["sum"]))
    expected = float(reference.read_text())
    if not abs(found["sum"] - expected) <= _TOLERANCE * abs(expected):
        raise ProgramError(f"the sum of its results is {found['sum']}; expected {expected}")
    return Measured(work.rows / found["seconds"], found)


def ours(work: Work, folder: Path, here: Path) -> dict[str, float]:
    """Run a job without the service on one rank; return its seconds, and the sum of its results."""
    file, run_dir = here / "spec.yaml", RunDir(here / "run")
    file.write_text(yaml.safe_dump(work.spec(folder)))
    run_module("train_loop.run", file, "--run-dir", run_dir.root, log=here / "log", ranks=1)
    times = {line["event"]: line["time"] for line in read_lines(run_dir.attempt(1).events)}
    column = "logprobs" if work.output == LOGPROBS else "generated_tokens"
    total = sum(float(np.sum(row[column])) for row in read_rows(run_dir))
    return {"seconds": times["work_ended"] - times["work_started"], "sum": total}


def table(samples: Sequence[Sample]) -> str:
    """Return a Markdown table of rows/s by output, with Trainshed's ratio to each program."""
    records = []
    for output in (LOGPROBS, GENERATE):
        of_output = [
            replace(one, variant=one.variant.removeprefix(f"{output}: "))
            for one in samples
            if one.variant.startswith(f"{output}: ")
        ]
        ratios = ratios_of(OURS, of_output)
        records += [
            {
                "output": output,
                "program": row.variant,
                "rows/s, median": row.error if row.median is None else f"{row.median:.2f}",
                "Trainshed's ÷ its, median [95 % interval]": ratios.get(row.variant),
            }
            for row in compare(of_output, LOOP)
        ]
    return markdown_table(records)


if __name__ == "__main__":
    main()
