"""Resumed runs whose parameter groups an earlier version has made by other rules."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import small_runs
from tests.support.builders.small_runs import STEPS, numbers
from tests.support.builders.specs import TINY
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.errors import UserError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.roles import Role, roles_of
from train_loop.optim import build, groups


@contextmanager
def earlier_roles() -> Iterator[None]:
    """Take the norms of queries for matrices, as an earlier version took rates of state spaces for some."""

    def earlier(anatomy: Anatomy) -> dict[int, Role]:
        found = roles_of(anatomy)
        named = anatomy.model.named_parameters()
        return found | {id(p): Role.WEIGHT for name, p in named if name.endswith("q_norm.weight")}

    with pytest.MonkeyPatch.context() as patch:
        for module in (build, groups):
            patch.setattr(module, "roles_of", earlier)
        yield


def resume_all(folder: Path) -> str:
    """Run some steps with other roles, then the rest; return the error of a run whose weights decay."""
    data, begun = folder / "d.parquet", STEPS // 2
    plain: dict[str, Any] = {"weight_decay": 0.0, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    small_runs.run(data, folder / "whole", **plain)
    with earlier_roles():
        small_runs.run(data, folder / "resumed", **plain, max_steps=begun)
        small_runs.run(data, folder / "decayed", **plain | {"weight_decay": 0.1}, max_steps=begun)
    small_runs.run(data, folder / "resumed", **plain)
    with pytest.raises(UserError) as refused:
        small_runs.run(data, folder / "decayed", **plain | {"weight_decay": 0.1})
    return str(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=24, length=small_runs.LENGTH, vocab=TINY["vocab_size"])
    (error,) = on_ranks(1, resume_all, folder)
    (folder / "error").write_text(error)
    return folder


def test_resumed_run_whose_groups_have_equal_settings_repeats_the_whole_run(folder: Path) -> None:
    resumed, whole = (small_runs.lines(folder / name) for name in ("resumed", "whole"))
    assert [numbers(line) for line in resumed] == [numbers(line) for line in whole]
    assert len(resumed) == STEPS


def test_resumed_run_whose_groups_differ_is_refused_by_name(folder: Path) -> None:
    first, second = (f"model.layers.0.self_attn.{name}_norm.weight" for name in "qk")
    assert (folder / "error").read_text() == (
        f"the checkpoint of step 3 has {first} and {second} in parameter groups with different settings, and this "
        "version of Trainshed trains both alike; clone the job, which then continues from that step with the groups of "
        "this version, or resume it with the earlier version"
    )
