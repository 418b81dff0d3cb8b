"""Strategies that must not change any bit of a run, including clipping, optimizer steps, averages and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import train_loop.optim.host_state
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_tensors, write_tokens
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir, read_lines
from train_loop.train import train

STEPS = 3
OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon")
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"offload_policy": True},
    "optimizer on the host": {"offload_policy": "optimizer"},
    "prefetch": {"forward_prefetch": 2, "backward_prefetch": 2},
    "kept": {"reshard_after_forward": False},
}
CASES = [(optimizer, "offload") for optimizer in OPTIMIZERS] + [("adamw", "prefetch"), ("adamw", "kept")]
CASES += [(optimizer, "optimizer on the host") for optimizer in ("adamw", "sgd", "muon")]


def train_all(folder: Path) -> None:
    train_loop.optim.host_state.PART_BYTES = 4096  # several parts
    for optimizer, strategy in CASES + [(optimizer, "plain") for optimizer in OPTIMIZERS]:
        job = spec(
            data={"train": {"path": str(folder / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
            # Clipping applies in every step.
            training={"optimizer": optimizer, "max_steps": STEPS, "global_batch_size": 8, "max_grad_norm": 0.3}
            | {"per_device_train_batch_size": 2, "weight_decay": 0.1, "ema_decay": 0.9},
            strategy=STRATEGIES[strategy],
            scaling={"num_workers": dist.get_world_size()},
        )
        run_dir = RunDir(folder / f"{optimizer} {strategy}")
        session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, run_dir, local_stream)
        train(job, session, find_dataset(job, folder))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=40, length=(9, 32), vocab=TINY["vocab_size"])
    on_ranks(2, train_all, folder)
    return folder


def numbers(folder: Path) -> list[tuple[float, ...]]:
    lines = read_lines(RunDir(folder).attempt(1).metrics)
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines]


@pytest.mark.parametrize(("optimizer", "strategy"), CASES)
def test_every_step_and_the_saved_state_are_bit_equal(runs: Path, optimizer: str, strategy: str) -> None:
    plain, moved = runs / f"{optimizer} plain", runs / f"{optimizer} {strategy}"
    assert len(numbers(plain)) == STEPS
    assert min(norm for _, _, norm, _ in numbers(plain)) > 0.3, "expected clipping in every step"
    assert numbers(moved) == numbers(plain)
    expected, found = (load_tensors(folder, STEPS) for folder in (plain, moved))
    assert {name.split("/")[1] for name in expected} >= {"model", "optimizer", "ema"}
    assert [name for name in sorted(expected) if not torch.equal(found[name], expected[name])] == []
