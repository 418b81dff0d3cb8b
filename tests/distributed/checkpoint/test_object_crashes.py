"""Crashes between any two requests to object storage, and damage: a resume uses a complete, committed checkpoint."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from tests.distributed.checkpoint.test_crashes import DAMAGED, SEED, a_run, fail, fill, resume
from tests.support.faults.object_crashes import Found, Request, RequestTrace, found_after_crashes
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from tests.support.servers.storage import bucket_of_runs, run_dir_on_s3
from train_loop import train
from train_loop.checkpoint import save
from train_loop.checkpoint.files.writer import OwnWriter
from train_loop.checkpoint.save import Saver
from train_loop.run_dir import RunDir
from train_loop.telemetry.timers import StepTimer

PLACE = RunDir.at("memory://runs/default/found")


def save_and_trace(folder: Path, attempt: int, steps: list[int]) -> list[Request]:
    """Make an attempt's saves as a run does; for a negative step, the save fails on the last rank."""
    run_dir = run_dir_on_s3("traced")
    run = a_run(folder, run_dir, attempt)
    save.PATIENCE = 0.0
    with pytest.MonkeyPatch.context() as patch:
        trace = RequestTrace(patch, "default/traced/checkpoints/")
        train.resume(run)
        saver = Saver(run.session.access, run.spec.checkpoint, "thread")
        for step in steps:
            run.state.step = run.state.consumed = abs(step)
            fill(run, abs(step))
            with pytest.MonkeyPatch.context() as broken:
                if step < 0 and dist.get_rank() == dist.get_world_size() - 1:
                    broken.setattr(OwnWriter, "write", fail)
                train.save(run, saver, {}, StepTimer())
                fault = saver.wait()
            assert (fault is None) == (step > 0), fault
            if fault is None and dist.get_rank() == 0:
                trace.report_durable(step)
    return trace.requests


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[list[Request]], dict[str, bytes]]]:
    """Return the requests and objects of two attempts on two ranks, with a failing save and retention."""
    folder = tmp_path_factory.mktemp("traced")
    write_tokens(folder / "d.parquet", rows=64, length=32, vocab=32)
    with bucket_of_runs():
        first = on_ranks(2, save_and_trace, folder, 1, [1, 2, -3, 4, 5])
        run_dir_on_s3("traced").write_fence(2)
        second = on_ranks(2, save_and_trace, folder, 2, [6, 7])
        checkpoints = run_dir_on_s3("traced").checkpoints
        there = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in checkpoints.glob("*/*")}
        yield folder, [*first, *second], there


def test_storage_model_knows_all_requests(
    traced: tuple[Path, list[list[Request]], dict[str, bytes]],
) -> None:
    _, traces, there = traced
    *_, last = found_after_crashes(traces)
    assert last.objects == there


def test_resume_after_any_crash_and_damage_uses_the_newest_complete_checkpoint(
    traced: tuple[Path, list[list[Request]], dict[str, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, traces, there = traced
    (outcomes,) = on_ranks(1, resume_all, folder, traces, there)
    with capsys.disabled():  # the proof includes the counts
        print("\n" + "\n".join(f"{count:5} objects, {outcome}" for outcome, count in sorted(outcomes.items())))  # noqa: T201
    assert sum(count for outcome, count in outcomes.items() if outcome.startswith("crash")) >= 60
    assert sum(count for outcome, count in outcomes.items() if outcome.startswith("damage")) == DAMAGED


def resume_all(folder: Path, traces: list[list[Request]], there: dict[str, bytes]) -> Counter[str]:
    """Resume from every state and count the outcomes. Raises AssertionError."""
    run = a_run(folder, RunDir(folder / "unused"), 2)
    outcomes = Counter[str]()
    for kind, states in (("crash", found_after_crashes(traces)), ("damage", damaged(there))):
        for state in states:
            MemoryFileSystem.store.clear()
            for key, content in state.objects.items():
                (PLACE.checkpoints / key).write_bytes(content)
            reported = max(state.promised, default=0)
            outcomes[f"{kind}: " + resume(run, PLACE, state.name, reported=reported)] += 1
    return outcomes


def damaged(there: dict[str, bytes]) -> Iterator[Found]:
    """Return the objects with one to three lost, truncated, bit-flipped, or swapped for another's content."""
    for number in range(DAMAGED):
        chance, objects = random.Random(f"{SEED}/{number}"), dict(there)
        chosen = chance.sample(sorted(objects), chance.randint(1, 3))
        for key in chosen:
            content = bytearray(objects[key])
            match chance.choice(["lose", "cut", "flip", "swap"]):
                case "lose":
                    del objects[key]
                case "cut":
                    objects[key] = bytes(content[: chance.randrange(len(content))])
                case "flip":
                    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                    objects[key] = bytes(content)
                case "swap":
                    objects[key] = there[chance.choice(sorted(there))]
        yield Found(objects, frozenset(), f"damage {number} to {', '.join(chosen)}")
