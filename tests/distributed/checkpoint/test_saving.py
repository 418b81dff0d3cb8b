"""Saves of whole runs on two ranks: their times, failed saves, and fenced attempts."""

import errno
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tests.support.builders.small_runs import LENGTH, STEPS, events, lines, run
from tests.support.builders.specs import TINY, raw_spec
from tests.support.ranks import torchrun
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from tests.support.ranks.warm_runs import WarmRun
from tests.support.waiting import wait_for
from train_loop import train
from train_loop.checkpoint import save
from train_loop.checkpoint.files import writer
from train_loop.checkpoint.manifest import newest_verified
from train_loop.checkpoint.save import Saver
from train_loop.errors import CheckpointError, FencedError
from train_loop.faults import preemption
from train_loop.liveness.fencing import check_fence
from train_loop.loop import coordination
from train_loop.loop.session import Preemption
from train_loop.run_dir import Fence, RunDir, Stop, read_lines

DEADLINE = 2e9


@contextmanager
def unwritable(*, seconds: float | None = None) -> Iterator[None]:
    """Prevent the last rank from writing large files, as on a full disk; for some seconds, or to the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    timer = threading.Timer(seconds or 0, resource.setrlimit, (resource.RLIMIT_FSIZE, (soft, hard)))
    write_file, failures = writer.write_file, iter([timer.start] if seconds is not None else [])

    def write_and_count_down(path: Path, pieces: Any) -> Any:
        """Write a file. The seconds begin with the first failure, however long the steps before it take."""
        try:
            return write_file(path, pieces)
        except OSError:
            next(failures, lambda: None)()
            raise

    with pytest.MonkeyPatch.context() as context:
        context.setattr(writer, "write_file", write_and_count_down)
        if dist.get_rank() == dist.get_world_size() - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
        try:
            yield
        finally:
            timer.cancel()
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def forbid(context: pytest.MonkeyPatch) -> None:
    """Let the first two writes of every rank fail."""
    write_file, tries = writer.write_file, iter(range(2))

    def refuse_and_write(path: Path, pieces: Any) -> Any:
        if next(tries, None) is not None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return write_file(path, pieces)

    context.setattr(writer, "write_file", refuse_and_write)


def error_of(patch: Callable[[pytest.MonkeyPatch], None], run_it: Callable[[], None]) -> str:
    """Return the final error of a run."""
    with pytest.MonkeyPatch.context() as context:
        patch(context)
        try:
            run_it()
        except (CheckpointError, FencedError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def all_runs(folder: Path) -> dict[str, Any]:
    """Run every case of this file on the same ranks, because starting ranks takes most of the time."""
    data, results = folder / "d.parquet", dict[str, Any]()

    def patience(context: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
        context.setattr(save, "PATIENCE", seconds)

    with unwritable():
        often = {"every_steps": 1, "max_consecutive_failures": 2}
        results["failing"] = error_of(patience, lambda: run(data, folder / "failing", checkpoint=often))
    with unwritable(seconds=1.5):
        results["delayed"] = error_of(lambda _: None, lambda: run(data, folder / "delayed"))
    results["forbidden"] = error_of(forbid, lambda: run(data, folder / "forbidden"))
    by_time = {"every_steps": None, "every_seconds": 1e-9, "keep_last": 10}
    run(data, folder / "by time", checkpoint=by_time)
    for mode in ("sync", "thread", "process"):
        run(data, folder / mode, strategy={"async_save_ckpt": mode})
    with pytest.MonkeyPatch.context() as context:
        context.setattr(preemption, "_POLL_SECONDS", 0.0)
        notices = iter([None, *[Preemption((1,), DEADLINE)] * 99])
        never = {"every_steps": None, "save_final": False, "keep_last": 10}
        run(data, folder / "preempted", checkpoint=never, place={"preemption": lambda: next(notices)})
    with pytest.MonkeyPatch.context() as context:
        began = hold_first_write(context)
        run(data, folder / "held", checkpoint={"every_steps": 2})
        results["held"] = began
    best = {"every_steps": 1, "keep_last": 1, "keep_best": {"metric": "grad_norm", "mode": "max"}}
    restarts = list[None]()
    run(data, folder / "best", checkpoint=best, place={"expect_restart": lambda: restarts.append(None)})
    results["restarts expected"] = len(restarts)
    return results


def hold_first_write(context: pytest.MonkeyPatch) -> list[int]:
    """Hold the first write until a step that began after it was logged; count concurrent writes."""
    written, at_once, now = writer.write_file, [], 0

    def wait_and_write(path: Path, pieces: Any) -> Any:
        nonlocal now
        now += 1
        at_once.append(now)
        if path.parent.name.startswith("step-00000002"):
            metrics = RunDir(path.parents[2]).attempt(1).metrics
            wait_for(lambda: any(line["step"] == 3 for line in read_lines(metrics)), "step 3 beside the save of step 2")
        try:
            return written(path, pieces)
        finally:
            now -= 1

    context.setattr(writer, "write_file", wait_and_write)
    return at_once


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("runs")
    torchrun.write_tokens(folder / "d.parquet", rows=64, length=32, vocab=TINY["vocab_size"])
    return folder, on_ranks(2, all_runs, folder)


Runs = tuple[Path, list[dict[str, Any]]]


def test_every_intermediate_save_calls_on_checkpoint(runs: Runs) -> None:
    _, results = runs
    assert [one["restarts expected"] for one in results] == [STEPS, STEPS]


def test_consecutive_failed_saves_end_the_attempt_within_a_step(runs: Runs) -> None:
    folder, results = runs
    for rank in results:
        assert rank["failing"].startswith("CheckpointError: 2 checkpoints in a row were not committed: ")
        assert "rank 1: OSError: [Errno 27] File too large" in rank["failing"]
        assert rank["failing"].endswith("or raise checkpoint.max_consecutive_failures")
    assert [(e["step"], e["in_a_row"]) for e in events(folder / "failing", "checkpoint_failed")] == [(1, 1), (2, 2)]
    end, *_ = events(folder / "failing", "training_ended")
    assert (end["result"], end["code"], end["retryable"]) == ("failed", "checkpoint_failed", True)
    # The save of step 2 fails during step 3; the run learns of it before step 4 at the latest.
    assert lines(folder / "failing")[-1]["step"] <= 3


@pytest.mark.parametrize(("name", "error"), [("delayed", "File too large"), ("forbidden", "Permission denied")])
def test_storage_outage_costs_no_checkpoint(runs: Runs, name: str, error: str) -> None:
    folder, results = runs
    assert [rank[name] for rank in results] == ["", ""]
    assert any(error in event["reason"] for event in events(folder / name, "checkpoint_delayed"))
    assert [event["step"] for event in events(folder / name, "checkpoint_committed")] == [3, 6]
    newest, rejected = newest_verified(RunDir(folder / name))
    assert newest is not None
    assert (newest.step, rejected) == (6, {})


def test_all_ranks_save_at_the_same_steps_by_time(runs: Runs) -> None:
    folder, _ = runs
    assert sorted(RunDir(folder / "by time").manifests()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("mode", ["sync", "thread", "process"])
def test_every_save_mode_commits_checkpoints_that_verify(runs: Runs, mode: str) -> None:
    folder, _ = runs
    run_dir = RunDir(folder / mode)
    newest, rejected = newest_verified(run_dir)
    assert newest is not None
    assert (sorted(run_dir.manifests()), newest.step, rejected) == ([3, 6], 6, {})


def test_preemption_notice_causes_one_checkpoint(runs: Runs) -> None:
    folder, _ = runs
    (notice,) = events(folder / "preempted", "preemption_notice")
    assert (notice["ranks"], notice["deadline"]) == ([1], DEADLINE)
    assert sorted(RunDir(folder / "preempted").manifests()) == [2]


def test_training_continues_during_a_write_and_writes_never_overlap(runs: Runs) -> None:
    folder, results = runs
    assert [max(rank["held"]) for rank in results] == [1, 1]
    assert [event["step"] for event in events(folder / "held", "checkpoint_committed")] == [2, 4, 6]
    assert sorted(RunDir(folder / "held").manifests()) == [4, 6]


def test_best_checkpoint_by_the_metric_of_its_step_stays(runs: Runs) -> None:
    folder, _ = runs
    norms = {line["step"]: line["grad_norm"] for line in lines(folder / "best")}
    best = max(norms, key=lambda step: norms[step])
    run_dir = RunDir(folder / "best")
    assert sorted(run_dir.manifests()) == sorted({best, 6})
    assert run_dir.manifests()[best].metrics["grad_norm"] == norms[best]


def endless(folder: Path, attempt: int, steps: int) -> str:
    """Run one attempt that saves after every step; return why it ended early."""
    try:
        run(
            folder / "d.parquet",
            folder / "shared",
            place={"attempt": attempt},
            checkpoint={"every_steps": 1},
            max_steps=steps,
        )
    except FencedError as error:
        return str(error)
    except RuntimeError:
        # The other rank saw the fence first and has exited.
        with pytest.raises(FencedError) as fenced:
            check_fence(RunDir(folder / "shared"), Fence(attempt))
        return str(fenced.value)
    return ""


def test_only_the_newer_of_two_live_attempts_commits(tmp_path: Path) -> None:
    torchrun.write_tokens(tmp_path / "d.parquet", rows=64, length=32, vocab=TINY["vocab_size"])
    run_dir = RunDir(tmp_path / "shared")
    with ThreadPoolExecutor(1) as other:
        older = other.submit(on_ranks, 2, endless, tmp_path, 1, 100_000)
        wait_for(lambda: max(run_dir.manifests(), default=0) >= 3 or older.done(), "three checkpoints")
        run_dir.write_fence(2)
        fenced = time.time()
        resumed = max(run_dir.manifests()) + 2
        assert on_ranks(2, endless, tmp_path, 2, resumed + 5) == ["", ""]
        assert older.result(timeout=120) == ["attempt 2 has taken over from attempt 1, which stops"] * 2
    committed = [e for e in read_lines(run_dir.attempt(1).events) if e["event"] == "checkpoint_committed"]
    # A commit that checked the fence before it was raised may still be reported.
    assert sum(event["time"] > fenced for event in committed) <= 1
    assert {m.attempt for step, m in run_dir.manifests().items() if step >= resumed} == {2}
    assert newest_verified(run_dir)[1] == {}


def endless_spec(data: Path) -> dict[str, Any]:
    """Return the spec of a run of two ranks that saves only when it is stopped."""
    return raw_spec(
        data={"train": {"path": str(data)}, "columns": {"input_ids": "ids"}, "packing": False},
        training={"max_steps": 100_000, "global_batch_size": 2},
        checkpoint={"every_steps": None},
        scaling={"num_workers": 2},
    )


def assert_paused(run_dir: RunDir) -> None:
    """Raise unless the run has paused after its last step, with a checkpoint of that step."""
    outcome = run_dir.attempt(1).outcome()
    assert outcome is not None, run_dir.root.with_suffix(".log").read_text()[-3000:]
    assert (outcome.result, outcome.step) == ("paused", torchrun.lines(run_dir.root)[-1]["step"])
    assert sorted(run_dir.manifests()) == [outcome.step]


def test_sigterm_to_torchrun_pauses_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    torchrun.write_tokens(tmp_path / "d.parquet", rows=64, length=32, vocab=TINY["vocab_size"])
    process = torchrun.start(endless_spec(tmp_path / "d.parquet"), run_dir.root, 2)
    torchrun.wait_for_step(run_dir.root, 3)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    process.wait(timeout=120)
    psutil.wait_procs(ranks, timeout=120)
    assert_paused(run_dir)


def test_sigint_to_every_rank_pauses_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    torchrun.write_tokens(tmp_path / "d.parquet", rows=64, length=32, vocab=TINY["vocab_size"])
    process = WarmRun(endless_spec(tmp_path / "d.parquet"), run_dir.root, 2)
    torchrun.wait_for_step(run_dir.root, 3)
    process.interrupt()
    process.wait(timeout=120)
    assert_paused(run_dir)


def pause_and_damage(data: Path, folder: Path) -> None:
    """Pause with a checkpoint that is damaged right after its commit; every rank must get the error."""
    RunDir(folder).write_stop(Stop(mode="pause", attempt=1))
    finish_saving = train.finish_saving

    def finish_and_damage(saver: Saver, stop: Stop | None) -> str | None:
        failure = finish_saving(saver, stop)
        if dist.get_rank() == 0:
            file = sorted(RunDir(folder).checkpoint(3).glob("*.distcp"))[0]
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        dist.barrier()
        return failure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "finish_saving", finish_and_damage)
        patch.setattr(coordination.StopSignal, "seen", property(after_three_steps(folder)))
        with pytest.raises(CheckpointError, match=r"step 3, just committed, is damaged: .* has another SHA-256"):
            run(data, folder, place={"proves_pauses": True})


def after_three_steps(folder: Path) -> Callable[[coordination.StopSignal], Stop | None]:
    """Return a stop signal that is set once three steps are done."""
    return lambda _: RunDir(folder).stop(attempt=1) if len(lines(folder)) >= 3 else None


def test_checkpoint_of_a_pause_is_verified_again(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=40, length=LENGTH, vocab=TINY["vocab_size"])
    on_ranks(2, pause_and_damage, tmp_path / "d.parquet", tmp_path / "run")
