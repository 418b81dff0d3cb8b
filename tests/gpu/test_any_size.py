"""Runs of `reproducible: any_size` on several GPUs have the bits of one GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.builders.any_size import CASES, MESHES, SPECIAL, STEPS, differing, numbers, train_case, write_data
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.run_dir import RunDir

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs or more")
FITTING = {name: mesh for name, mesh in MESHES.items() if mesh[0] <= GPUS}


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Callable[..., Any]]:
    with ranks_of_any_number(min(GPUS, 4), backend="cpu:gloo,cuda:nccl") as call:
        yield call


# Compiled kernels may have other bits in another process on GPUs, so such jobs are refused.
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not case.model.get("compile")])
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


@pytest.mark.parametrize("name", SPECIAL)
def test_other_meshes_of_gpus_have_the_same_bits(call_ranks: Callable[..., Any], tmp_path: Path, name: str) -> None:
    write_data(tmp_path)
    case, meshes = SPECIAL[name]
    first, *others = [mesh for mesh in meshes if mesh in FITTING]
    for mesh in (first, *others):
        call_ranks(MESHES[mesh][0], train_case, tmp_path, case, mesh, RunDir(tmp_path / mesh), 1, (STEPS, True))
    if not others:
        pytest.skip("needs four CUDA GPUs")
    for mesh in others:
        assert numbers(tmp_path / mesh) == numbers(tmp_path / first)
        assert differing(tmp_path / mesh, tmp_path / first) == []


@pytest.mark.parametrize("case", ["qwen3 fp32", "qwen3 tied bf16", "muon"])
def test_run_resized_between_gpus_has_the_bits_of_one_gpu(
    call_ranks: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    write_data(tmp_path)
    call_ranks(1, train_case, tmp_path, CASES[case], "1", RunDir(tmp_path / "alone"), 1, (STEPS, True))
    resized = RunDir(tmp_path / "resized")
    legs = [("2", 2, True), ("1", 4, False), ("4" if GPUS >= 4 else "2", 4, True), ("1", STEPS, True)]
    for attempt, (name, stop, checkpoint) in enumerate(legs, start=1):
        resized.write_fence(attempt)
        call_ranks(MESHES[name][0], train_case, tmp_path, CASES[case], name, resized, attempt, (stop, checkpoint))
        resized.stop_file.unlink(missing_ok=True)
    # The second leg is stopped without a checkpoint: the third repeats its steps.
    assert [line["step"] for line in numbers(resized.root)] == [1, 2, 3, 4, 3, 4, 5]
    expected = {line["step"]: line for line in numbers(tmp_path / "alone")}
    for line in numbers(resized.root):
        assert str(line) == str(expected[line["step"]])
    assert differing(resized.root, tmp_path / "alone") == []
