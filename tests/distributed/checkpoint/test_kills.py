"""SIGKILL at random moments, repeatedly: the final run is bit-equal to a run without kills.

This file kills one or all ranks, in plain processes that start in a second. tests/e2e/test_jobs.py kills the driver
and workers of Ray.
"""

import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.builders.searches import seeds
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import on_ranks, ranks_to_kill
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop.checkpoint.manifest import newest_verified
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir, read_lines
from train_loop.train import train

SEED, KILLS = 5, seeds(5, more=14)
ROWS, BATCH, STEPS, EVERY = 48, 4, 30, 3


def train_on(folder: Path, name: str, mode: str) -> None:
    """Train a short run that saves every third step, from its newest checkpoint."""
    job = spec(
        model={"config": TINY | {"attention_dropout": 0.1}, "dtype": "fp32"} | {"gradient_checkpointing": "none"},
        data={"train": {"path": str(folder / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
        training={"max_steps": STEPS, "global_batch_size": BATCH, "audit_samples": True, "ema_decay": 0.9}
        | {"per_device_train_batch_size": 2},
        strategy={"async_save_ckpt": mode},
        checkpoint={"every_steps": EVERY},
        scaling={"num_workers": dist.get_world_size()},
    )
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder / name), local_stream)
    train(job, session, find_dataset(job, folder))


def newest(folder: Path, name: str) -> int:
    """Return the step of the newest checkpoint, or 0."""
    return max(RunDir(folder / name).checkpoint_folders(), default=0)


def kill_some(folder: Path, name: str, mode: str, chance: random.Random, *, seconds: float) -> str | None:
    """Start the run and kill one rank or all at a random moment. Return the victims, or None if it had ended."""
    whom, saves = chance.choice(["rank 0", "rank 1", "all ranks"]), chance.randrange(4)
    with ranks_to_kill(2, train_on, folder, name, mode) as ranks:
        # A slow start must not let all kills hit the start.
        first, deadline = newest(folder, name), math.inf
        while time.monotonic() < deadline and any(rank.is_alive() for rank in ranks):
            if deadline == math.inf and newest(folder, name) >= first + saves * EVERY:
                deadline = time.monotonic() + chance.uniform(0, seconds if saves == 0 else seconds / 10)
            ranks[0].join(timeout=0.02)
        if not all(rank.is_alive() for rank in ranks):
            assert [rank.join(30) or rank.exitcode for rank in ranks] == [0, 0], f"{name} failed without a kill"
            return None
        for number, rank in enumerate(ranks):
            if whom in (f"rank {number}", "all ranks"):
                rank.kill()
        # A peer may notice the loss before the launcher terminates it too.
        ranks[chance.randrange(2)].join(chance.uniform(0, 1))
    return whom


Killed = tuple[Path, list[str]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Return runs after the total number of kills, the names of finished ones, and a run without kills."""
    folder, chance = tmp_path_factory.mktemp("killed"), random.Random(SEED)
    write_tokens(folder / "d.parquet", rows=ROWS, length=32, vocab=TINY["vocab_size"])
    on_ranks(2, train_on, folder, "reference", "thread")
    first, *_, last = metrics(folder / "reference")
    seconds = last["time"] - first["time"]
    kills, names = 0, ["run 1"]
    while kills < KILLS:
        mode = "process" if len(names) % 2 else "thread"
        if kill_some(folder, names[-1], mode, chance, seconds=seconds):
            kills += 1
        else:
            names.append(f"run {len(names) + 1}")
    on_ranks(2, train_on, folder, names[-1], "thread")
    return folder, names


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_lines(RunDir(run_dir).attempt(1).metrics))


def test_killed_runs_resumed_from_checkpoints(killed: Killed) -> None:
    """Check that the kills hit running attempts; otherwise the other tests prove nothing."""
    folder, names = killed
    starts = [
        event["resumed_from"]
        for name in names
        for event in read_lines(RunDir(folder / name).attempt(1).events)
        if event["event"] == "training_started"
    ]
    assert len([start for start in starts if 0 < start < STEPS]) >= KILLS // 3, starts


def test_last_checkpoint_is_bit_equal(killed: Killed) -> None:
    folder, names = killed
    expected = load_checkpoint(folder / "reference", STEPS)
    for name in names:
        newest, rejected = newest_verified(RunDir(folder / name))
        assert newest is not None
        assert (newest.step, rejected) == (STEPS, {})
        found = load_checkpoint(folder / name, STEPS)
        for part in ("model", "ema"):
            for weight, value in expected[part].items():
                assert torch.equal(found[part][weight], value), (name, weight)
        for weight, moments in expected["optimizer"]["state"].items():
            for moment, value in moments.items():
                assert torch.equal(found["optimizer"]["state"][weight][moment], value), (name, weight, moment)


def test_surviving_history_trains_every_sample_once_per_epoch(killed: Killed) -> None:
    folder, names = killed
    expected = {line["step"]: (line["loss"], line["samples"]) for line in metrics(folder / "reference")}
    for name in names:
        history = {line["step"]: (line["loss"], line["samples"]) for line in metrics(folder / name)}
        assert history == expected, name
    steps = [samples for _, (_, samples) in sorted(expected.items())]
    epoch = [sample for samples in steps[: ROWS // BATCH] for sample in samples]
    assert sorted(epoch) == list(range(ROWS))
