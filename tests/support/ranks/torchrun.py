"""Runs of the loop under plain torchrun, and their metrics and checkpoints."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.waiting import wait_for
from train_loop.run_dir import RunDir, read_lines


def write_tokens(path: Path, *, rows: int, length: int | tuple[int, int], vocab: int) -> None:
    """Write a Parquet file of random, tokenised samples, of one length or of any length in a range."""
    draw = np.random.default_rng(0)
    shortest, longest = length if isinstance(length, tuple) else (length, length)
    lengths = draw.integers(shortest, longest + 1, rows)
    pq.write_table(pa.table({"ids": [draw.integers(0, vocab, n).astype(np.int32).tolist() for n in lengths]}), path)


def start(spec: dict[str, Any], run_dir: Path, world: int) -> subprocess.Popen[str]:
    """Start a run on `world` ranks."""
    file = run_dir.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "-m", "train_loop.run", str(file), "--run-dir", str(run_dir)]
    with run_dir.with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)


def run(spec: dict[str, Any], run_dir: Path, world: int) -> None:
    """Run the loop to its end."""
    process = start(spec, run_dir, world)
    assert process.wait(timeout=240) == 0, run_dir.with_suffix(".log").read_text()[-4000:]


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL the launcher and all of its ranks at once."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=30)
    process.wait()


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics lines of the first attempt."""
    return list(read_lines(RunDir(run_dir).attempt(1).metrics))


def wait_for_step(run_dir: Path, step: int) -> None:
    """Wait until a step has been logged."""
    wait_for(lambda: any(line["step"] >= step for line in lines(run_dir)), f"step {step} of {run_dir}", seconds=120)


def load_checkpoint(run_dir: Path, step: int) -> dict[str, Any]:
    """Return all full values of a checkpoint, loaded in this process."""
    whole = run_dir / f"whole-{step}.pt"
    dcp_to_torch_save(RunDir(run_dir).checkpoint(step), whole)
    values: dict[str, Any] = torch.load(whole, weights_only=False)
    return values


def load_tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by path, such as `/model/lm_head.weight`: weights, states and averages."""

    def leaves(values: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(values, torch.Tensor):
            yield path, values
        elif isinstance(values, dict):
            for key, value in values.items():
                yield from leaves(value, f"{path}/{key}")

    return dict(leaves(load_checkpoint(run_dir, step), ""))
