"""The quickstart's model learns on its own mesh as on one rank."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from tests.support.ranks.ranks import on_ranks
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir, read_lines
from train_loop.spec import parse
from train_loop.train import train

STEPS = 16


def quickstart(*, world: int) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(Path("examples/quickstart.yaml").read_text())
    raw["training"] |= {"max_steps": STEPS, "per_device_train_batch_size": 2}
    strategy = raw["strategy"] if world > 1 else {}
    return raw | {"strategy": strategy, "scaling": {"num_workers": world}, "checkpoint": {"save_final": False}}


def learn(folder: Path) -> list[float]:
    """Train the quickstart's first steps; return their losses."""
    world = dist.get_world_size()
    job, run_dir = parse(quickstart(world=world)), RunDir(folder / f"{world} ranks")
    session = Session(dist.get_rank(), world, 0, 1, run_dir, local_stream)
    train(job, session, find_dataset(job, folder / "cache"))
    return [line["loss"] for line in read_lines(run_dir.attempt(1).metrics)]


def test_quickstart_learns_as_on_one_rank(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(quickstart(world=4)))
    command = [sys.executable, "-m", "train_loop.prepare", str(tmp_path / "spec.yaml")]
    command += ["--cache", str(tmp_path / "cache")]
    subprocess.run(
        command, check=True, capture_output=True, timeout=180, env=os.environ | {"RAY_AUTH_MODE": "disabled"}
    )
    packed = find_dataset(parse(quickstart(world=4)), tmp_path / "cache")
    assert packed.utilisation >= 0.97, "expected padded samples"
    expected, found = on_ranks(1, learn, tmp_path)[0], on_ranks(4, learn, tmp_path)[0]
    assert len(found) == STEPS
    assert expected[-1] < expected[0] - 1, "expected a lower loss"
    assert found == pytest.approx(expected, rel=0.01)
