"""Random schedules of kills and resizes of a run with `reproducible: any_size` end with the bits of one rank.

A leg is the part of a schedule between two starts. Its result depends only on the bits of the checkpoint that it
resumes from, on the mesh that wrote them, and on its own mesh. So each such leg runs once, for all schedules.
`MORE=1` adds the mesh of two ranks to those of one and four, which have all kinds of meshes, and a
third step: then each also resumes from the second.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.any_size import MESHES as ALL
from tests.support.builders.any_size import Case, differing, numbers, train_case, write_data
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.checkpoint.digest import digest_step
from train_loop.run_dir import RunDir

STEPS, SCHEDULES = (3 if os.environ.get("MORE") else 2), 200
MESHES = {name: mesh for name, mesh in ALL.items() if name != "2" or os.environ.get("MORE")}
CASE = Case(
    training={"max_steps": STEPS, "ema_decay": 0.9, "eval_steps": 2},
    checkpoint={"every_steps": 1, "keep_last": STEPS},
)


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of a step in a leg's run directory."""

    root: Path
    mesh: str
    step: int


@dataclass
class Legs:
    """The legs that have run, by what their results depend on: bits, mesh of the checkpoint, own mesh."""

    call_ranks: Callable[..., Any]
    folder: Path
    roots: dict[tuple[str | None, str | None, str], Path] = field(default_factory=dict)

    def run(self, start: Checkpoint | None, mesh: str) -> Path:
        """Return the run directory of a leg to the last step, which is compared with one rank when it first runs."""
        key = (None, None, mesh) if start is None else (digest(start.root, start.step), start.mesh, mesh)
        if key not in self.roots:
            self.roots[key] = self.folder / f"leg {len(self.roots)}"
            self._train(start, mesh, RunDir(self.roots[key]))
        return self.roots[key]

    def _train(self, start: Checkpoint | None, mesh: str, run_dir: RunDir) -> None:
        first = 0 if start is None else start.step
        if start is not None:
            shutil.copytree(RunDir(start.root).checkpoint(first), run_dir.checkpoint(first))
        self.call_ranks(MESHES[mesh][0], train_case, self.folder, CASE, mesh, run_dir, 1, (STEPS, True))
        alone = self.run(None, "1")
        assert numbers(run_dir.root) == numbers(alone)[first:]
        for step in range(first + 1, STEPS + 1):
            assert differing(run_dir.root, alone, step) == []


@cache
def digest(root: Path, step: int) -> str:
    """Return the SHA-256 of all tensors of a checkpoint."""
    found = digest_step(RunDir(root), step)
    assert found is not None
    return found.sha256


@pytest.fixture(scope="module")
def legs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Legs]:
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    with ranks_of_any_number(4) as call:
        yield Legs(call, folder)


def test_random_schedules_have_the_bits_of_one_rank(legs: Legs) -> None:
    for seed in range(SCHEDULES):
        draw = random.Random(seed)
        newest: Checkpoint | None = None
        stop = 0
        while stop < STEPS:
            mesh = draw.choice(list(MESHES))
            root = legs.run(newest, mesh)
            stop = draw.randint(1 if newest is None else newest.step + 1, STEPS)
            if draw.random() < 0.6:
                newest = Checkpoint(root, mesh, stop)
            # Otherwise the leg is killed before it has saved this step.
        assert digest(root, STEPS) == digest(legs.run(None, "1"), STEPS), f"schedule {seed}"
    # Every mesh has started, and has resumed from every step of every mesh. Different bits would need more legs.
    assert len(legs.roots) == len(MESHES) + (STEPS - 1) * len(MESHES) ** 2
