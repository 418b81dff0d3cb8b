"""A run limited by tokens: it ends at the same step at every world size and can be resumed."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir, read_lines
from train_loop.train import train

TOKENS, BATCH, ROWS = 500, 4, 16


def train_by_tokens(folder: Path, name: str) -> None:
    """Train a run to its end."""
    job = spec(
        data={"train": {"path": str(folder / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
        training={"max_steps": None, "max_tokens": TOKENS, "global_batch_size": BATCH},
        checkpoint={"every_steps": 2, "keep_last": 10},
        scaling={"num_workers": dist.get_world_size()},
    )
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder / name), local_stream)
    train(job, session, find_dataset(job, folder))


def train_and_resume(folder: Path) -> None:
    """Train a run to its end; again after its end; and again after its last checkpoints are lost."""
    run_dir = RunDir(folder / "resumed")
    train_by_tokens(folder, "one rank")
    for _ in range(2):
        train_by_tokens(folder, "resumed")
    (run_dir.root / "ended.jsonl").write_bytes(run_dir.attempt(1).metrics.read_bytes())
    for step in list(run_dir.manifests())[2:]:
        shutil.rmtree(run_dir.checkpoint(step))
    train_by_tokens(folder, "resumed")


def lines(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    # Few and short rows, so that the run exceeds its estimate and one epoch.
    write_tokens(folder / "d.parquet", rows=ROWS, length=(9, 24), vocab=TINY["vocab_size"])
    on_ranks(1, train_and_resume, folder)
    on_ranks(2, train_by_tokens, folder, "two ranks")
    return folder


def metrics(runs: Path, name: str) -> list[dict[str, Any]]:
    return lines(RunDir(runs / name).attempt(1).metrics)


def test_run_ends_at_the_first_step_that_reaches_the_tokens(runs: Path) -> None:
    found = metrics(runs, "one rank")
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    assert found[-2]["tokens"] < TOKENS <= found[-1]["tokens"]
    assert len(found) * BATCH > ROWS, "expected a second epoch"
    epoch = sum(map(len, pq.read_table(runs / "d.parquet")["ids"].to_pylist()))
    assert found[ROWS // BATCH - 1]["tokens"] == epoch, "padding was counted"


def test_another_world_size_gives_the_same_run(runs: Path) -> None:
    for one, two in zip(metrics(runs, "one rank"), metrics(runs, "two ranks"), strict=True):
        assert (two["step"], two["tokens"], two["lr"]) == (one["step"], one["tokens"], one["lr"])
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_learning_rate_reaches_its_end_with_the_tokens(runs: Path) -> None:
    events = lines(RunDir(runs / "one rank").attempt(1).events)
    (estimate,) = (event["steps"] for event in events if event["event"] == "training_started")
    rates = [line["lr"] for line in metrics(runs, "one rank")]
    epoch = sum(map(len, pq.read_table(runs / "d.parquet")["ids"].to_pylist()))
    assert estimate == -(-TOKENS * ROWS // (epoch * BATCH)), "expected short rows to count their tokens only"
    assert abs(estimate - len(rates)) <= 1
    assert rates == sorted(rates, reverse=True)
    assert 0 <= rates[-1] < 0.1 * rates[0]


def test_finished_run_trains_no_more_steps(runs: Path) -> None:
    ended = lines(runs / "resumed" / "ended.jsonl")
    assert [line["step"] for line in ended] == [line["step"] for line in metrics(runs, "one rank")]


def test_resumed_run_ends_at_the_step_of_the_uninterrupted_one(runs: Path) -> None:
    expected = [{name: line[name] for name in ("step", "loss", "lr", "tokens")} for line in metrics(runs, "one rank")]
    replayed = metrics(runs, "resumed")[len(expected) :]
    assert replayed[0]["step"] == 5
    assert [{name: line[name] for name in expected[0]} for line in replayed] == expected[4:]
