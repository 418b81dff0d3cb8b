"""Wait of training for data, as a share of a step, and rows/s of the data stream without a model.

`python -m benchmarks.data.data_wait [--rounds N] [--quick]`. The share is measured on rank 0 in the quickstart through
`POST /jobs`, and with a model of a tenth of its size. One service runs all jobs and prepares their data once.
Rows/s are measured over a shuffled epoch, against a map-style `datasets` with torch's DataLoader, which yields only
token ids.
"""

import functools
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.data.prepare import OFFLINE
from benchmarks.data.streams import write_samples
from benchmarks.harness import (
    Measured,
    Sample,
    bootstrap_interval,
    command_line,
    compare,
    interleave,
    markdown_table,
    parse,
    ratios_of,
    write_result,
)
from benchmarks.launch import ProgramError, expect_starts, metrics, run_for_json
from benchmarks.training.step_overhead import POLL_SECONDS
from examples.demo import SPEC, service
from train_loop.run_dir import RunDir
from trainshed import Api

TENTH = {"hidden_size": 40, "intermediate_size": 112, "head_dim": 8}
"""Sizes for a model of a tenth of the quickstart's: 240 thousand parameters, two thirds of them embeddings."""
JOBS: dict[str, dict[str, int]] = {"the quickstart": {}, "with a model a tenth of the size": TENTH}
FIRST_COUNTED = 5
"""Number of warm-up steps that are not counted."""
OURS, RAY = "Trainshed, torchrun", "Trainshed, Ray Data"
DRAINS: dict[str, tuple[str, list[str]]] = {
    OURS: ("benchmarks.data.drain_run", ["local"]),
    RAY: ("benchmarks.data.drain_run", ["ray"]),
    "`datasets`, DataLoader with two workers": ("benchmarks.peers.hf_drain", []),
}
BATCH = 8
EPOCHS = {256: 32_768, 2048: 8_192}
"""Rows by sequence length."""


def main() -> None:
    """Run the jobs, then the streams without a model, and write both tables."""
    arguments = parse(command_line(__doc__))
    quick = arguments.quick
    epochs = dict.fromkeys(EPOCHS, 1024) if quick else EPOCHS
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        waits = run_jobs(Path(root), arguments.rounds, quick=quick)
        drains = {
            length: drain(Path(root, f"{length}"), length, rows, arguments.rounds) for length, rows in epochs.items()
        }
    write_result(
        "data-wait",
        settings={"quickstart": quickstart(quick=quick), "tenth": TENTH, "first_counted": FIRST_COUNTED}
        | {"epochs": epochs, "batch": BATCH, "rounds": arguments.rounds, "quick": quick},
        data=[*waits, *(sample for found in drains.values() for sample in found)],
        table=f"{wait_table(waits)}\n\n{drain_table(drains)}",
        folder=arguments.results,
    )


def quickstart(*, quick: bool) -> dict[str, Any]:
    """Return the quickstart's spec; with `quick`, few steps on few files."""
    spec: dict[str, Any] = yaml.safe_load(SPEC.read_text())
    if quick:
        spec["training"] |= {"max_steps": 2 * FIRST_COUNTED, "warmup_steps": 1}
        spec["data"]["train"]["path"] = "stdlib://json/*.py"
    return spec


def run_jobs(root: Path, rounds: int, *, quick: bool) -> list[Sample]:
    """Measure the share of waiting in each job."""
    home = root / "service"
    home.mkdir()
    with service(home) as (client, _):
        runs = {}
        for name, smaller in JOBS.items():
            spec = quickstart(quick=quick)
            spec["model"]["config"] |= smaller
            runs[name] = functools.partial(one_job, client, yaml.safe_dump(spec))
        return interleave(runs, rounds)


def one_job(client: Api, spec: str) -> Measured:
    """Return the share of its steps' time in which a job waits for data. Raises ProgramError."""
    job = client.submit(spec)
    while not job.state.terminal:
        time.sleep(POLL_SECONDS)
        job = client.job(job.id)
    if job.state != "SUCCEEDED":
        raise ProgramError(f"the job ended as {job.state}: {job.reason and job.reason.message}")
    expect_starts(job.run_dir, 1)
    steps = [
        {name: line[name] for name in ("step", "step_seconds", "data_wait_seconds")}
        for line in metrics(RunDir.at(job.run_dir).root)
    ]
    return Measured(wait_share(steps[FIRST_COUNTED:]), {"steps": steps})


def wait_share(steps: Sequence[dict[str, float]]) -> float:
    """Return the share of the steps' total time. A mean of shares would give short and long steps the same weight."""
    return sum(step["data_wait_seconds"] for step in steps) / sum(step["step_seconds"] for step in steps)


def drain(folder: Path, length: int, rows: int, rounds: int) -> list[Sample]:
    """Measure rows/s of all programs at one sequence length."""
    write_samples(folder, samples=rows, length=length)
    runs = {name: functools.partial(one_drain, folder, length, *program) for name, program in DRAINS.items()}
    found = interleave(runs, rounds)
    shutil.rmtree(folder)
    return found


def one_drain(folder: Path, length: int, module: str, way: list[str]) -> Measured:
    """Return rows/s of one start. Raises ProgramError."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as here:
        variables = OFFLINE | {"HF_HOME": here}
        found = run_for_json(module, folder, *way, BATCH, here=Path(here), variables=variables)
    return Measured(found["rows_per_second"], found | {"sequence_length": length})


def wait_table(samples: Sequence[Sample]) -> str:
    """Return a Markdown table of the share of waiting and the seconds per step."""
    records: list[dict[str, Any]] = []
    for name in JOBS:
        mine = [sample for sample in samples if sample.variant == name]
        shares = [sample.value for sample in mine if sample.value is not None]
        if not shares:
            records.append({"job": name, "waits for data": mine[0].error})
            continue
        steps = [step["step_seconds"] for sample in mine for step in sample.raw.get("steps", [])[FIRST_COUNTED:]]
        low, high = bootstrap_interval(shares)
        share = f"{np.median(shares):.2%} [{low:.2%}, {high:.2%}]"
        records.append(
            {
                "job": name,
                "waits for data, share of a step, median [95 % interval]": share,
                "seconds a step, median": f"{np.median(steps):.4f}",
            }
        )
    return markdown_table(records)


def drain_table(drains: dict[int, list[Sample]]) -> str:
    """Return a Markdown table of rows/s at each length, and the ratios of Trainshed to the peer."""
    return markdown_table(
        [
            {
                "sequence_length": length,
                "program": row.variant,
                "rows/s, median": row.error if row.median is None else f"{row.median:,.0f}",
                **{f"{ours} ÷ it": ratios_of(ours, samples).get(row.variant) for ours in (OURS, RAY)},
            }
            for length, samples in drains.items()
            for row in compare(samples, OURS)
        ]
    )


if __name__ == "__main__":
    main()
