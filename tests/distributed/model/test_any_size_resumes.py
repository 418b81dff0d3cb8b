"""A run with `reproducible: any_size` resumes with the same bits from every mesh on every mesh.

Any sequence of kills, pauses and resizes consists of such resumes, so that all sequences end with the same bits.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.any_size import MESHES, STEPS, Case, differing, numbers, train_case, write_data
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.run_dir import RunDir

CASE = Case(training={"ema_decay": 0.9, "eval_steps": 2}, checkpoint={"keep_last": STEPS})
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


@pytest.mark.parametrize("after", MESHES)
@pytest.mark.parametrize("before", MESHES)
def test_resume_from_any_mesh_on_any_mesh_has_the_bits_of_one_rank(
    call_ranks: Callable[..., Any], undisturbed: Path, before: str, after: str
) -> None:
    names = list(MESHES)
    # Each mesh resumes once from each step.
    step = 1 + (names.index(before) + names.index(after)) % (STEPS - 1)
    resumed = RunDir(undisturbed / f"{before} to {after}")
    shutil.copytree(RunDir(undisturbed / before).checkpoint(step), resumed.checkpoint(step))
    call_ranks(MESHES[after][0], train_case, undisturbed, CASE, after, resumed, 1, (STEPS, True))
    assert numbers(resumed.root) == numbers(undisturbed / "1")[step:]
    assert differing(resumed.root, undisturbed / "1") == []
