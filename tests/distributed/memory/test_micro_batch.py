"""Runs with `per_device_train_batch_size: auto`, compared with runs whose spec has the number."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.builders import small_runs
from tests.support.builders.small_runs import LENGTH, lines, numbers
from tests.support.builders.specs import TINY
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop import train
from train_loop.errors import MemoryRanOutError
from train_loop.faults.micro_batch_choices import smaller_is_left
from train_loop.model.folder import model_shape
from train_loop.plan import RankMemory, estimated_need, plan_job, sized
from train_loop.run_dir import RunDir, read_lines
from train_loop.spec import JobSpec
from train_loop.telemetry.event_log import read_attempts

BATCH, FITS = 16, 4
"""Sequences of a step, and of the largest micro-batch that the plan allows."""
Choices = list[tuple[int, str]]


def room(spec: JobSpec, ranks: int) -> RankMemory:
    """Return the memory of a device that micro-batches of FITS sequences just fit."""
    assert ranks == 2
    chosen = sized(spec, FITS)
    need = estimated_need(chosen, plan_job(chosen, model_shape(spec.model)))
    return RankMemory("fake", int(1.1 * need.host_bytes) + 1, on_gpu=False)


def other_device(spec: JobSpec, ranks: int) -> RankMemory:
    return RankMemory("other", room(spec, ranks).bytes, on_gpu=False)


def run(folder: Path, name: str, attempt: int = 1, memory: Any = room, **training: Any) -> None:
    place = {"rank_memory": memory, "attempt": attempt}
    wanted: dict[str, Any] = {"per_device_train_batch_size": "auto", "global_batch_size": BATCH} | training
    small_runs.run(folder / "d.parquet", folder / name, place=place, **wanted)


def run_out(folder: Path, name: str, attempt: int, largest: int) -> None:
    """Train until the step of micro-batches above `largest` runs out of memory."""

    def limited(state: Any, objective: Any, batches: Any, **named: Any) -> Any:
        every = list(batches)
        if max(len(one.labels) for one in every) > largest:
            raise torch.OutOfMemoryError("the device is full")
        return step(state, objective, every, **named)

    step: Any = vars(train)["train_step"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", limited)
        run(folder, name, attempt)


def train_all(folder: Path) -> tuple[list[bool], list[str]]:
    """Train all runs. Return whether a smaller size was left after each failure, and the classes of the errors."""
    left, errors = list[bool](), list[str]()
    run(folder, "auto")
    run(folder, "number", per_device_train_batch_size=FITS)
    run(folder, "number 2", per_device_train_batch_size=2)
    for attempt in (1, 2):
        try:
            run_out(folder, "full", attempt, largest=2)
        except MemoryRanOutError as error:
            errors.append(type(error).__name__)
            spec = small_runs.job_of(
                folder / "d.parquet",
                2,
                training={
                    "per_device_train_batch_size": "auto",
                    "global_batch_size": BATCH,
                    "max_steps": small_runs.STEPS,
                },
            )
            left.append(smaller_is_left(spec, RunDir(folder / "full")))
    run(folder, "full", 3, max_steps=7)
    run(folder, "full", 4, other_device, max_steps=8)
    return left, errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[list[bool], list[str]]]:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=64, length=LENGTH, vocab=TINY["vocab_size"])
    return folder, on_ranks(2, train_all, folder)[0]


def choices(folder: Path) -> Choices:
    events = read_attempts(RunDir(folder))
    return [(line["size"], line["because"]) for line in events if line["event"] == "micro_batch_chosen"]


def assert_same_training(folder: Path, name: str, other: str) -> None:
    ours, theirs = ([numbers(line) for line in lines(folder / one)] for one in (name, other))
    assert ours == theirs
    weights, expected = (load_checkpoint(folder / one, small_runs.STEPS)["model"] for one in (name, other))
    assert all(torch.equal(weights[key], value) for key, value in expected.items())


def test_run_equals_that_with_the_number_written_down(folder: Any) -> None:
    assert choices(folder[0] / "auto") == [(FITS, "plan")]
    assert [event["size"] for event in small_runs.events(folder[0] / "auto", "micro_batch_proven")] == [FITS]
    assert choices(folder[0] / "number") == []
    assert_same_training(folder[0], "auto", "number")


def test_next_smaller_size_follows_a_lack_of_memory_and_stays_on_this_device(folder: Any) -> None:
    path, (left, errors) = folder
    assert (left, errors) == ([True], ["MemoryRanOutError"])
    assert choices(path / "full") == [(FITS, "plan"), (2, "out_of_memory"), (2, "kept"), (FITS, "plan")]
    found = [numbers(line) for line in read_lines(RunDir(path / "full").attempt(2).metrics)]
    assert found == [numbers(line) for line in lines(path / "number 2")]
