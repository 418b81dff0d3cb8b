"""Runs of `reproducible: any_size` on several GPUs have the bits of one GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.builders.any_size import CASES, MESHES, STEPS, differing, numbers, train_case, write_data
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.run_dir import RunDir

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs or more")
FITTING = {name: mesh for name, mesh in MESHES.items() if mesh[0] <= GPUS}


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Callable[..., Any]]:
    with ranks_of_any_number(min(GPUS, 4), backend="cpu:gloo,cuda:nccl") as call:
        yield call


@pytest.mark.parametrize("case", CASES)
def test_every_mesh_of_gpus_has_the_bits_of_one_gpu(call_ranks: Callable[..., Any], tmp_path: Path, case: str) -> None:
    write_data(tmp_path)
    for name, (world, _) in FITTING.items():
        run_dir = RunDir(tmp_path / name)
        call_ranks(world, train_case, tmp_path, CASES[case], name, run_dir, 1, (STEPS, True))
    alone = tmp_path / "1"
    assert len(numbers(alone)) == STEPS
    for name in FITTING:
        assert str(numbers(tmp_path / name)) == str(numbers(alone))
        assert differing(tmp_path / name, alone) == []


@pytest.mark.parametrize("case", ["qwen3 fp32", "qwen3 tied bf16", "muon"])
def test_run_resized_between_gpus_has_the_bits_of_one_gpu(
    call_ranks: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    write_data(tmp_path)
    call_ranks(1, train_case, tmp_path, CASES[case], "1", RunDir(tmp_path / "alone"), 1, (STEPS, True))
    resized = RunDir(tmp_path / "resized")
    legs = [("2", 3, True), ("1", 5, False), ("4" if GPUS >= 4 else "2", 6, True), ("1", STEPS, True)]
    for attempt, (name, stop, checkpoint) in enumerate(legs, start=1):
        resized.write_fence(attempt)
        call_ranks(MESHES[name][0], train_case, tmp_path, CASES[case], name, resized, attempt, (stop, checkpoint))
        resized.stop_file.unlink(missing_ok=True)
    expected = {line["step"]: line for line in numbers(tmp_path / "alone")}
    for line in numbers(resized.root):
        assert str(line) == str(expected[line["step"]])
    assert differing(resized.root, tmp_path / "alone") == []
