"""The quickstart's model: equal learning with split weights, split sequences, or both."""

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
MESHES: dict[str, dict[str, Any]] = {
    "as shipped": {"fsdp_size": 4, "ulysses_size": 2},
    "fsdp": {"fsdp_size": 4},
    "hsdp x sp": {"fsdp_size": 2, "ulysses_size": 2},
}


def quickstart(strategy: dict[str, Any], *, world: int) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(Path("examples/quickstart.yaml").read_text())
    raw["training"] |= {"max_steps": STEPS, "per_device_train_batch_size": 2}
    return raw | {"strategy": strategy, "scaling": {"num_workers": world}, "checkpoint": {"save_final": False}}


def learn(folder: Path, meshes: dict[str, dict[str, Any]]) -> None:
    """Train the quickstart's first steps at every mesh."""
    for name, strategy in meshes.items():
        job = parse(quickstart(strategy, world=dist.get_world_size()))
        session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder / name), local_stream)
        train(job, session, find_dataset(job, folder / "cache"))


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "spec.yaml").write_text(yaml.safe_dump(quickstart({}, world=4)))
    prepare = [sys.executable, "-m", "train_loop.prepare", str(folder / "spec.yaml"), "--cache", str(folder / "cache")]
    subprocess.run(
        prepare, check=True, capture_output=True, timeout=180, env=os.environ | {"RAY_AUTH_MODE": "disabled"}
    )
    packed = find_dataset(parse(quickstart({}, world=4)), folder / "cache")
    assert packed.utilisation >= 0.97, "expected padded samples"
    on_ranks(1, learn, folder, {"one rank": {}})
    on_ranks(4, learn, folder, MESHES)
    return {
        name: [line["loss"] for line in read_lines(RunDir(folder / name).attempt(1).metrics)]
        for name in ["one rank", *MESHES]
    }


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_reaches_the_same_loss(losses: dict[str, list[float]], mesh: str) -> None:
    assert len(losses[mesh]) == STEPS
    assert losses["one rank"][-1] < losses["one rank"][0] - 1, "expected a lower loss"
    assert losses[mesh] == pytest.approx(losses["one rank"], rel=0.01)
