"""A run with `reproducible: any_size` resumes with the same bits from every step, from every mesh, on every mesh.

A schedule of kills, pauses and resizes is a chain of such resumes: each reads a checkpoint of some step that some mesh
wrote. As all of them have the bits of one rank, so have all schedules over these steps, of which there are thousands.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.any_size import MESHES, Case, differing, numbers, train_case, write_data
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.run_dir import RunDir

STEPS = 3
CASE = Case(training={"max_steps": STEPS, "ema_decay": 0.9, "eval_steps": 2}, checkpoint={"keep_last": STEPS})
SAVING = Case(training=CASE.training, checkpoint=CASE.checkpoint | {"every_steps": 1})


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Callable[..., Any]]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.fixture(scope="module")
def undisturbed(call_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data and an undisturbed run per mesh, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    for mesh, (world, _) in MESHES.items():
        call_ranks(world, train_case, folder, SAVING, mesh, RunDir(folder / mesh), 1, (STEPS, True))
        assert sorted(RunDir(folder / mesh).manifests()) == list(range(1, STEPS + 1))
    return folder


@pytest.mark.parametrize("step", range(1, STEPS))
@pytest.mark.parametrize("after", MESHES)
@pytest.mark.parametrize("before", MESHES)
def test_resume_of_any_mesh_on_any_mesh_has_the_bits_of_one_rank(
    call_ranks: Callable[..., Any], undisturbed: Path, before: str, after: str, step: int
) -> None:
    resumed = RunDir(undisturbed / f"{before} to {after} after {step}")
    shutil.copytree(RunDir(undisturbed / before).checkpoint(step), resumed.checkpoint(step))
    call_ranks(MESHES[after][0], train_case, undisturbed, CASE, after, resumed, 1, (STEPS, True))
    assert numbers(resumed.root) == numbers(undisturbed / "1")[step:]
    assert differing(resumed.root, undisturbed / "1", STEPS) == []
