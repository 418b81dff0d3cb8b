"""Runs of `reproducible: any_size` have the same bits at every number of ranks and across changes of it."""

import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.support.builders import any_size
from tests.support.builders.any_size import (
    CASES,
    MESHES,
    SPECIAL,
    STEPS,
    differing,
    numbers,
    train_case,
    weighted_case,
    write_data,
)
from tests.support.builders.searches import drawn, seeds
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.checkpoint.digest import digest_step
from train_loop.data.order import StepOrder
from train_loop.loop.reduction import OrderedReduction, PlainReduction
from train_loop.run_dir import RunDir, read_lines
from train_loop.state import seed_generators

CallRanks = Callable[..., Any]
DEFAULT = {"reproducible": "same_size", "reduction_tree": None}
ON_ALL = ("qwen3 fp32", "qwen3 tied bf16")
"""Cases that are always compared on all meshes."""


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[CallRanks]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    return folder


def trained(call_ranks: CallRanks, folder: Path, case: str, mesh: str) -> Path:
    """Return the folder of a case's undisturbed run on a mesh."""
    run_dir = folder / f"{case} on {mesh}"
    if not run_dir.exists():
        call_ranks(MESHES[mesh][0], train_case, folder, CASES[case], mesh, RunDir(run_dir), 1, (STEPS, True))
    return run_dir


def compared() -> Iterator[tuple[str, str]]:
    """Yield the cases, each with the meshes that are compared with one rank.

    Without `MORE=1`, a commit draws a third of the others, with one mesh of four ranks; one in three commits compiles.
    """
    compiles = 0 in drawn(range(3), 1)
    turns = itertools.cycle([("2x2",), ("4",)])
    others = [name for name in CASES if name not in ON_ALL]
    some = [*ON_ALL, *drawn(others, len(others) // 3)]
    for name, case in CASES.items():
        if name not in some or (case.model.get("compile") and not compiles):
            continue
        one = {"4", "2x2"} <= {*case.meshes} and name not in ON_ALL and "MORE" not in os.environ
        for mesh in next(turns) if one else case.meshes:
            yield name, mesh


@pytest.mark.parametrize(("case", "mesh"), list(compared()))
def test_every_mesh_has_the_bits_of_one_rank(call_ranks: CallRanks, folder: Path, case: str, mesh: str) -> None:
    alone, found = trained(call_ranks, folder, case, "1"), trained(call_ranks, folder, case, mesh)
    assert len(numbers(alone)) == STEPS
    assert str(numbers(found)) == str(numbers(alone))
    assert differing(found, alone) == []


@pytest.mark.parametrize(("case", "mesh"), [one for one in compared() if one[0] in (*ON_ALL, "muon")])
def test_digests_do_not_depend_on_the_mesh(call_ranks: CallRanks, folder: Path, case: str, mesh: str) -> None:
    alone, found = (digest_step(RunDir(trained(call_ranks, folder, case, name)), STEPS) for name in ("1", mesh))
    assert alone is not None
    assert found == alone
    names = {name.partition(".")[0] for name in alone.tensors}
    assert names == {"model", "optimizer", *({"ema"} if "ema_decay" in CASES[case].training else ())}


SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "1x2": (2, {}),
    "2x1": (2, {"fsdp_size": 1}),
    "1x4": (4, {}),
    "2x2": (4, {"fsdp_size": 2}),
}


def train_drawn(folder: Path, seed: int, mesh: str, run_dir: RunDir) -> None:
    """Train a drawn case on a mesh."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(any_size, "MESHES", {"1": (1, {})} | SIZES)
        train_case(folder, weighted_case(seed), mesh, run_dir, 1, (STEPS, True))


@pytest.mark.parametrize("seed", range(seeds(1, more=100)))
def test_weighted_losses_of_any_family_do_not_depend_on_the_mesh(
    call_ranks: CallRanks, tmp_path: Path, seed: int
) -> None:
    write_data(tmp_path, seed)
    sizes = list(SIZES) if os.environ.get("MORE") else [list(SIZES)[seed % len(SIZES)]]
    for mesh in ("1", *sizes):
        world = SIZES.get(mesh, (1, {}))[0]
        call_ranks(world, train_drawn, tmp_path, seed, mesh, RunDir(tmp_path / mesh))
    for mesh in sizes:
        assert str(numbers(tmp_path / mesh)) == str(numbers(tmp_path / "1"))
        assert differing(tmp_path / mesh, tmp_path / "1") == []


def test_digests_of_another_step_differ(call_ranks: CallRanks, folder: Path) -> None:
    short = folder / "qwen3 fp32 for one step less"
    call_ranks(2, train_case, folder, CASES["qwen3 fp32"], "2", RunDir(short), 1, (STEPS - 1, True))
    found, other = (
        digest_step(RunDir(trained(call_ranks, folder, "qwen3 fp32", "2")), STEPS),
        digest_step(RunDir(short), STEPS - 1),
    )
    assert found is not None
    assert other is not None
    assert found.tensors.keys() == other.tensors.keys()
    assert found.sha256 != other.sha256


def test_the_case_that_is_not_finite_skips_steps(call_ranks: CallRanks, folder: Path) -> None:
    events = read_lines(RunDir(trained(call_ranks, folder, "not finite", "2x2")).attempt(1).events)
    assert [event["step"] for event in events if event["event"] == "step_skipped"]


@pytest.mark.parametrize("name", SPECIAL)
def test_other_meshes_have_the_same_bits(call_ranks: CallRanks, folder: Path, name: str) -> None:
    case, (first, *others) = SPECIAL[name]
    others = drawn(others, 1)
    for mesh in (first, *others):
        run_dir = RunDir(folder / f"{name} on {mesh}")
        call_ranks(MESHES[mesh][0], train_case, folder, case, mesh, run_dir, 1, (STEPS, True))
    for mesh in others:
        assert numbers(folder / f"{name} on {mesh}") == numbers(folder / f"{name} on {first}")
        assert differing(folder / f"{name} on {mesh}", folder / f"{name} on {first}") == []


@pytest.mark.parametrize("seed", range(int(os.environ.get("SCHEDULES", "2"))))
def test_resized_and_killed_runs_have_the_bits_of_the_undisturbed_run(
    call_ranks: CallRanks, folder: Path, seed: int
) -> None:
    """Check random schedules in one run directory: each leg is stopped, with a checkpoint or without one.

    `SCHEDULES=200` tries 200 of them, which takes about five minutes. test_any_size_schedules.py shares their legs.
    """
    draw = random.Random(seed)
    case = draw.choice(("qwen3 fp32", "qwen3 tied bf16", "muon", "weighted"))
    alone, run_dir = trained(call_ranks, folder, case, "1"), RunDir(folder / f"{case} by schedule {seed}")
    attempt = done = 0
    while done < STEPS:
        attempt += 1
        mesh = draw.choice(list(MESHES))
        stop = draw.randint(done + 1, STEPS) if attempt < 5 else STEPS
        checkpoint = draw.random() < 0.6
        run_dir.write_fence(attempt)
        call_ranks(MESHES[mesh][0], train_case, folder, CASES[case], mesh, run_dir, attempt, (stop, checkpoint))
        run_dir.stop_file.unlink(missing_ok=True)
        done = stop if checkpoint or stop == STEPS else done
    expected = {line["step"]: line for line in numbers(alone)}
    assert {line["step"] for line in numbers(run_dir.root)} == expected.keys()
    for line in numbers(run_dir.root):
        assert str(line) == str(expected[line["step"]])
    assert differing(run_dir.root, alone) == []


def train_by_default(folder: Path, mesh: str, run_dir: RunDir) -> None:
    """Train the first case on a mesh, with the sums of FSDP2."""
    case = replace(CASES["qwen3 fp32"], training=CASES["qwen3 fp32"].training | DEFAULT)
    train_case(folder, case, mesh, run_dir, 1, (STEPS, True))


def test_by_default_the_bits_depend_on_the_mesh(call_ranks: CallRanks, folder: Path) -> None:
    alone, found = (folder / f"by default on {mesh}" for mesh in ("1", "4"))
    for mesh, run_dir in (("1", alone), ("4", found)):
        call_ranks(MESHES[mesh][0], train_by_default, folder, mesh, RunDir(run_dir))
    assert differing(found, alone)


def train_without(folder: Path, ingredient: str, mesh: str, run_dir: RunDir) -> None:
    """Train the first case on a mesh, with one part of the order missing."""
    with pytest.MonkeyPatch.context() as patch:
        ABLATIONS[ingredient](patch)
        train_case(folder, CASES["qwen3 fp32"], mesh, run_dir, 1, (STEPS, True))


def default_reduce_scatter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FSDPModule, "set_custom_reduce_scatter", lambda *_: None)


def torch_norm(patch: pytest.MonkeyPatch) -> None:
    def plain_norm(reduction: OrderedReduction) -> torch.Tensor:
        return PlainReduction(reduction._model, reduction.mesh).grad_norm()

    patch.setattr(OrderedReduction, "grad_norm", plain_norm)


def fused_adamw(patch: pytest.MonkeyPatch) -> None:
    make = torch.optim.AdamW.__init__

    def fused(*arguments: Any, **options: Any) -> None:
        make(*arguments, **options | {"fused": True, "foreach": False})

    patch.setattr(torch.optim.AdamW, "__init__", fused)


def order_by_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepOrder, "_places", property(lambda self: np.arange(self.global_batch).reshape(self.dp, -1)))


def seed_by_rank(patch: pytest.MonkeyPatch) -> None:
    def seed(number: int, *, step: int, rank: int) -> None:
        seed_generators(number, step=step, rank=dist.get_rank())

    patch.setattr("train_loop.loop.reduction.seed_generators", seed)


def losses_by_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OrderedReduction, "sum", PlainReduction.sum)


ABLATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "gradients: FSDP2's reduce-scatter": default_reduce_scatter,
    "gradient norm": torch_norm,
    "optimizer flavour": fused_adamw,
    "order of samples": order_by_rank,
    "dropout seeds": seed_by_rank,
    "losses": losses_by_rank,
}


@pytest.mark.parametrize("ingredient", drawn([*ABLATIONS], 2))
def test_without_any_part_the_bits_depend_on_the_mesh(call_ranks: CallRanks, folder: Path, ingredient: str) -> None:
    alone, found = (folder / f"without {ingredient} on {mesh}" for mesh in ("1", "4"))
    for mesh, run_dir in (("1", alone), ("4", found)):
        call_ranks(MESHES[mesh][0], train_without, folder, ingredient, mesh, RunDir(run_dir))
    assert numbers(found) != numbers(alone) or differing(found, alone)
