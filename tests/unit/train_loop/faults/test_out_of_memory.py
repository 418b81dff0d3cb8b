"""Out of memory: the report, at most one retry, and the suggested remedies."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import OutOfMemoryError as KilledByRay

from tests.support.builders.small_runs import events
from tests.support.builders.specs import may_read, spec
from tests.support.families.families import small
from train_loop.errors import MemoryRanOutError, TooLittleMemoryError
from train_loop.faults.failure import failed, report_failure
from train_loop.faults.memory_events import describe_killed
from train_loop.faults.out_of_memory import memory_watched
from train_loop.loop.session import Session
from train_loop.model.faults import full_memory
from train_loop.model.folder import model_shape
from train_loop.plan import memory_remedies
from train_loop.preflight.model import check_model
from train_loop.ray_train.callbacks import GroupCallback
from train_loop.run_dir import RunDir

ON_GPU = {"resources_per_worker": {"CPU": 1.0, "GPU": 1.0}}
SHAPE = model_shape(spec().model)


def rank_of(folder: Path, *, epoch: int, rank: int = 0) -> Session:
    return Session(rank, 2, rank, 1, RunDir(folder), lambda *_: iter(()), epoch=epoch)


def run_out(session: Session, error: Exception, job: Any = None) -> Exception:
    watched = memory_watched(job or spec(scaling=ON_GPU), session)
    with pytest.raises((MemoryRanOutError, TooLittleMemoryError)) as raised, report_failure(session), watched:
        raise error
    return raised.value


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full. See the documentation. x")


def test_full_device_is_reported_with_rank_host_sizes_and_cheapest_remedies_first(tmp_path: Path) -> None:
    outcome = failed(run_out(rank_of(tmp_path, epoch=1, rank=1), CUDA))
    assert (outcome.code, outcome.retryable) == ("out_of_memory", True)
    assert outcome.reason is not None
    assert outcome.reason.startswith("rank 1 on ")
    assert (
        "ran out of device memory (OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in outcome.reason
    )
    assert "the plan estimates 0.8 MiB per rank: optimizer 0.3 MiB, parameters 0.2 MiB" in outcome.reason
    assert "remedies, cheapest first: strategy.apply_tiled_mlp: true; " in outcome.reason
    (event,) = events(tmp_path, "out_of_memory")
    assert (event["rank"], event["memory"], event["again"]) == (1, "device", False)
    assert {"parameters", "optimizer"} <= event["estimate"].keys()
    assert events(tmp_path, "training_ended") == []


def test_out_of_memory_run_is_retried_once_unless_it_made_progress(tmp_path: Path) -> None:
    assert isinstance(run_out(rank_of(tmp_path, epoch=1), CUDA), MemoryRanOutError)
    # The other ranks run out of memory too.
    assert isinstance(run_out(rank_of(tmp_path, epoch=1, rank=1), CUDA), MemoryRanOutError)
    RunDir(tmp_path).checkpoint(10).mkdir(parents=True)
    assert isinstance(run_out(rank_of(tmp_path, epoch=2), CUDA), MemoryRanOutError)
    last = run_out(rank_of(tmp_path, epoch=3), CUDA)
    assert isinstance(last, TooLittleMemoryError)
    outcome = failed(last)
    assert (outcome.code, outcome.retryable) == ("out_of_memory", False)
    (end,) = events(tmp_path, "training_ended")
    assert (end["code"], end["result"]) == ("out_of_memory", "failed")


def test_host_without_memory_is_reported_as_the_host(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert full_memory(raised.value) == "host"
    message = str(run_out(rank_of(tmp_path, epoch=1), raised.value, spec()))
    assert "ran out of host memory" in message
    assert "failure.spare_workers: false; strategy.async_save_ckpt: false" in message
    assert full_memory(MemoryError()) == "host"
    assert full_memory(RuntimeError("shapes do not match")) is None


def test_process_killed_by_ray_for_memory_is_out_of_memory() -> None:
    outcome = failed(KilledByRay("Task was killed due to the node running low on memory."))
    assert (outcome.code, outcome.retryable) == ("out_of_memory", True)


def test_third_group_does_not_start_after_two_without_memory(tmp_path: Path) -> None:
    for epoch in (1, 2):
        run_out(rank_of(tmp_path, epoch=epoch), CUDA)
    # As if both groups had no time to report the end of the run.
    file = RunDir(tmp_path).attempt(1).events
    lines = [line for line in file.read_text().splitlines() if "training_ended" not in line]
    file.write_text("\n".join(lines) + "\n")
    callback: Any = GroupCallback(RunDir(tmp_path), 1, spec(), autoscaled=False)
    callback._monitor = SimpleNamespace(await_cause=lambda seconds: None)
    callback._flush_events = lambda: None
    message = "two worker groups ran out of memory, with no new checkpoint between them: rank 0 on .* remedies"
    with pytest.raises(TooLittleMemoryError, match=message):
        callback.before_worker_group_start(None)


def test_killed_rank_is_reported_with_sizes_and_remedies(tmp_path: Path) -> None:
    RunDir(tmp_path).checkpoint(10).mkdir(parents=True)
    event = describe_killed(
        {"rank": 1, "error": "rank 1 on a was killed"}, RunDir(tmp_path), spec(checkpoint={"every_steps": 1})
    )
    assert (event["rank"], event["committed"]) == (1, 10)
    assert event["error"].startswith(
        "rank 1 on a was killed; the plan estimates 1.3 MiB per rank: checkpoint_staging 0.5 MiB"
    )
    assert "cheapest first: failure.spare_workers: false" in event["error"]
    assert {"parameters", "optimizer"} <= event["estimate"].keys()


def test_killed_rank_is_reported_if_the_model_is_unreadable(tmp_path: Path) -> None:
    lost = spec(model={"config": None, "path": (tmp_path / "gone").as_uri()})
    event = describe_killed({"error": "rank 1 on a was killed"}, RunDir(tmp_path), lost)
    assert event == {"error": "rank 1 on a was killed", "committed": None}


@pytest.mark.parametrize(
    ("parts", "place", "first"),
    [
        ({"model": {"gradient_checkpointing": "none"}}, "device", "model.gradient_checkpointing: selective, or full"),
        ({"model": {"gradient_checkpointing": "selective"}}, "device", "model.gradient_checkpointing: full"),
        ({"model": {"gradient_checkpointing": {"every": 2}}}, "device", "model.gradient_checkpointing: full"),
        ({"training": {"per_device_train_batch_size": 4}}, "device", "training.per_device_train_batch_size: 2 at"),
        ({"strategy": {"sharding_strategy": "NO_SHARD"}}, "device", "strategy.sharding_strategy: FULL_SHARD"),
        (
            {"strategy": {"wrap_policy": {"min_num_params": 9}}},
            "device",
            "a smaller strategy.wrap_policy.min_num_params",
        ),
        ({"training": {"chunked_loss": False}}, "device", "training.chunked_loss: null"),
        ({}, "host", "failure.spare_workers: false"),
    ],
)
def test_cheapest_unused_remedy_is_named_first(parts: dict[str, dict[str, Any]], place: Any, first: str) -> None:
    job = spec(**{"scaling": ON_GPU, **parts})
    assert memory_remedies(job, place, SHAPE)[0].startswith(first)
    every = spec(
        scaling=ON_GPU,
        strategy={"apply_tiled_mlp": True, "offload_policy": True},
        training={"optimizer": "adamw_8bit"},
        model={"gradient_checkpointing": "offload"},
    )
    assert memory_remedies(every, "device", SHAPE) == [
        "a larger strategy.ulysses_size than 1, or a smaller data.sequence_length",
        "more workers in scaling.num_workers, for smaller shards",
    ]


def test_remedies_are_accepted_with_shared_layers() -> None:
    whole, shared, split = (
        memory_remedies(spec(scaling={"num_workers": 2} | ON_GPU, strategy=strategy), "device", SHAPE)
        for strategy in ({}, {"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True})
    )
    assert [one for one in whole if one not in shared] == ["training.optimizer: adamw_8bit"]
    assert [one for one in shared if one not in split] == ["strategy.sequence_parallel: true"]


@pytest.mark.parametrize(("family", "tiles"), [("qwen3_moe", False), ("deepseek_v3", True), ("gemma2", True)])
def test_tiles_are_a_remedy_for_models_that_accept_them(family: str, tiles: bool) -> None:
    job = spec(model={"config": small(family)})
    shape, _ = check_model(job, may_read())
    assert shape is not None
    assert ("strategy.apply_tiled_mlp: true" in memory_remedies(job, "device", shape)) is tiles
    unbuilt = memory_remedies(job, "device", model_shape(job.model))
    assert "strategy.apply_tiled_mlp: true" not in unbuilt, "only the model's code shows it"
