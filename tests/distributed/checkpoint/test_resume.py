"""A run killed with SIGKILL and restarted in fresh processes, compared with an uninterrupted run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.builders.small_runs import events
from tests.support.builders.specs import TINY, raw_spec
from tests.support.ranks import torchrun
from tests.support.ranks.hold import hold
from tests.support.ranks.warm_runs import WarmRun, run
from tests.support.waiting import wait_for
from train_loop.checkpoint.manifest import newest_verified
from train_loop.run_dir import Fence, RunDir, read_lines

STEPS = 10


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = tmp_path_factory.mktemp("data") / "tokens.parquet"
    torchrun.write_tokens(data, rows=64, length=32, vocab=TINY["vocab_size"])
    return raw_spec(
        # Dropout, so that the generators of every rank must be restored too.
        model={"config": TINY | {"attention_dropout": 0.1, "tie_word_embeddings": True}, "dtype": "fp32"},
        data={"train": {"path": str(data)}, "columns": {"input_ids": "ids"}, "packing": False},
        training={"max_steps": STEPS, "global_batch_size": 4, "audit_samples": True, "weight_decay": 0.1}
        | {"per_device_train_batch_size": 2},
        strategy={"ulysses_size": 2},
        checkpoint={"every_steps": 4},
        scaling={"num_workers": 2},
    )


@pytest.fixture(scope="module")
def uninterrupted(spec: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    run(spec, run_dir, 2)
    return run_dir


@pytest.fixture(scope="module")
def resumed(spec: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "resumed"
    # It would save step 8 on a machine that is slow to kill it.
    hold(run_dir.parent, run_dir.name, 6)
    process = WarmRun(spec, run_dir, 2)
    torchrun.wait_for_step(run_dir, 6)
    wait_for(lambda: RunDir(run_dir).manifests(), "the checkpoint of step 4")
    process.kill()
    hold(run_dir.parent, run_dir.name, None)
    run(spec, run_dir, 2)
    return run_dir


def numbers(line: dict[str, Any]) -> list[Any]:
    return [line[name] for name in ("loss", "grad_norm", "lr", "tokens", "samples")]


def test_run_resumes_from_the_last_committed_step_and_replays_the_rest(resumed: Path) -> None:
    starts = [e for e in read_lines(RunDir(resumed).attempt(1).events) if e["event"] == "training_started"]
    assert [event["resumed_from"] for event in starts] == [0, 4]
    assert starts[1]["replayed"] >= 2


def test_every_line_is_bit_equal_to_the_uninterrupted_run(uninterrupted: Path, resumed: Path) -> None:
    expected = {line["step"]: numbers(line) for line in torchrun.lines(uninterrupted)}
    found = torchrun.lines(resumed)
    assert {line["step"] for line in found} == set(range(1, STEPS + 1))
    assert len(found) > STEPS, "expected a replayed step"
    for line in found:
        assert numbers(line) == expected[line["step"]], f"step {line['step']}"


def test_mean_loss_of_a_line_includes_steps_before_the_resumed_checkpoint(spec: dict[str, Any], tmp_path: Path) -> None:
    some = spec | {"training": spec["training"] | {"logging_steps": 3, "audit_samples": False}}
    run(some, tmp_path / "run", 2)
    shutil.rmtree(RunDir(tmp_path / "run").checkpoint(STEPS))
    run(some, tmp_path / "run", 2)
    assert [event["resumed_from"] for event in events(tmp_path / "run", "training_started")] == [0, 8]
    found = torchrun.lines(tmp_path / "run")
    assert [line["step"] for line in found] == [3, 6, 9, 10, 9, 10]
    assert [line["loss"] for line in found[2:4]] == [line["loss"] for line in found[4:]]


def test_final_checkpoint_is_bit_equal(uninterrupted: Path, resumed: Path) -> None:
    expected, found = (torchrun.load_checkpoint(run_dir, STEPS) for run_dir in (uninterrupted, resumed))
    for name, weight in expected["model"].items():
        assert torch.equal(found["model"][name], weight), name
    for name, moments in expected["optimizer"]["state"].items():
        for moment, value in moments.items():
            assert torch.equal(found["optimizer"]["state"][name][moment], value), (name, moment)
    assert found["scheduler"] == expected["scheduler"]


def test_only_the_newest_checkpoints_stay_and_they_verify(resumed: Path) -> None:
    run_dir = RunDir(resumed)
    assert sorted(run_dir.manifests()) == [8, 10]
    newest, rejected = newest_verified(run_dir)
    assert newest is not None
    assert (newest.step, rejected) == (10, {})
    assert {path.name for path in run_dir.checkpoints.iterdir()} == {"step-00000008", "step-00000010"}


def test_damaged_checkpoint_is_reported_and_skipped(spec: dict[str, Any], uninterrupted: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "damaged"
    shutil.copytree(uninterrupted, run_dir)
    shard = next(RunDir(run_dir).checkpoint(STEPS).glob("__1_*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    run(spec, run_dir, 2)
    events = list(read_lines(RunDir(run_dir).attempt(1).events))
    rejected = [event for event in events if event["event"] == "checkpoint_rejected"]
    assert [(event["step"], event["reason"]) for event in rejected] == [
        (STEPS, f"{shard.name} has another SHA-256 than when it was committed")
    ]
    assert [e["resumed_from"] for e in events if e["event"] == "training_started"] == [0, 8]
    assert numbers(torchrun.lines(run_dir)[-1]) == numbers(torchrun.lines(uninterrupted)[-1])


def test_stop_request_ends_the_run_with_a_checkpoint(spec: dict[str, Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "stopped"
    long = spec | {"training": spec["training"] | {"max_steps": 100_000}, "checkpoint": {"every_steps": None}}
    process = WarmRun(long, run_dir, 2)
    torchrun.wait_for_step(run_dir, 3)
    (run_dir / "control").mkdir(exist_ok=True)
    (run_dir / "control" / "stop.json").write_text('{"mode": "cancel", "checkpoint": true}')
    assert process.wait(timeout=120) == 0
    outcome = RunDir(run_dir).attempt(1).outcome()
    assert outcome is not None
    assert outcome.result == "cancelled"
    assert sorted(RunDir(run_dir).manifests()) == [outcome.step]


def test_second_start_on_a_directory_supersedes_the_first(spec: dict[str, Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "shared"
    long = spec | {"training": spec["training"] | {"max_steps": 100_000}, "strategy": {}, "scaling": {"num_workers": 1}}
    first = WarmRun(long, run_dir, 1)
    torchrun.wait_for_step(run_dir, 3)
    second = WarmRun(long, run_dir, 1)
    assert first.wait(timeout=120) != 0
    assert second.poll() is None
    torchrun.wait_for_step(run_dir, torchrun.lines(run_dir)[-1]["step"] + 4)
    (run_dir / "control" / "stop.json").write_text('{"mode": "cancel", "checkpoint": true}')
    assert second.wait(timeout=120) == 0
    epochs = [line["epoch"] for line in torchrun.lines(run_dir)]
    assert (epochs[0], epochs[-1], epochs == sorted(epochs)) == (1, 2, True)
    assert RunDir(run_dir).fence() == Fence(1, 2)
    newest, rejected = newest_verified(RunDir(run_dir))
    assert newest is not None
    assert (newest.epoch, rejected) == (2, {})


def test_fenced_attempt_commits_nothing(spec: dict[str, Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "fenced"
    RunDir(run_dir).write_fence(2)
    process = WarmRun(spec, run_dir, 2)
    assert process.wait(timeout=120) != 0
    assert "attempt 2 has taken over from attempt 1" in run_dir.with_suffix(".log").read_text()
    assert RunDir(run_dir).manifests() == {}
