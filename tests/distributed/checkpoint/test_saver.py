"""Concurrent saves: a checkpoint contains the values of its step, regardless of further training."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.builders.specs import spec
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop import train
from train_loop.checkpoint import save, select
from train_loop.checkpoint.files import layout
from train_loop.checkpoint.manifest import verify
from train_loop.checkpoint.save import Saver
from train_loop.checkpoint.store.open import open_store
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.errors import CheckpointError, FencedError
from train_loop.loop import session
from train_loop.loop.build import Run, build_run
from train_loop.loop.session import Session
from train_loop.run_dir import Fence, Manifest, RunDir, read_lines
from train_loop.spec import SaveMode
from train_loop.telemetry.timers import StepTimer


def a_run(folder: Path) -> Run:
    """Return a run of one tiny model over all ranks."""
    job = spec(
        data={"train": {"path": str(folder / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
        scaling={"num_workers": dist.get_world_size()},
    )
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder / "run"), local_stream)
    return build_run(job, session, find_dataset(job, folder))


def a_saver(run: Run, mode: SaveMode = "thread") -> Saver:
    return Saver(run.session.access, run.spec.checkpoint, mode)


def whole(run: Run) -> dict[str, Tensor]:
    """Return all weights, gathered."""
    parameters = run.state.model.named_parameters()
    return {name: p.full_tensor().clone() if isinstance(p, DTensor) else p.clone() for name, p in parameters}


def save_at(run: Run, saver: Saver, step: int) -> None:
    run.state.step = step
    train.save(run, saver, {"loss": float(step)}, StepTimer())


def save_and_train_on(folder: Path, mode: SaveMode, file_bytes: int) -> dict[str, Tensor]:
    """Save step 7, zero the weights, save step 8; resume from each and return the weights of step 7."""
    run = a_run(folder)
    before = whole(run)
    layout.FILE_BYTES = file_bytes
    saver = a_saver(run, mode)
    save_at(run, saver, 7)
    with torch.no_grad():
        for parameter in run.state.model.parameters():
            parameter.zero_()
    # The second save reuses the same memory.
    save_at(run, saver, 8)
    saver.close()
    zeroed, other = a_run(folder), a_run(folder)
    train.resume(zeroed)
    assert zeroed.state.step == 8
    assert all(not weight.any() for weight in whole(zeroed).values())
    dist.barrier()
    if dist.get_rank() == 0:
        open_store(run.session.run_dir, Fence(1)).put_aside(8)
    dist.barrier()
    train.resume(other)
    assert other.state.step == 7
    assert all(torch.equal(whole(other)[name], weight) for name, weight in before.items())
    return before


@pytest.mark.parametrize(
    ("mode", "file_bytes"),
    [
        (mode, file_bytes)
        for number, mode in enumerate(("sync", "thread", "process"))
        for place, file_bytes in enumerate((layout.FILE_BYTES, 100_000))
        # Modes write the same files.
        if number % 2 == place or os.environ.get("MORE")
    ],
)
def test_checkpoint_contains_the_values_of_its_step(tmp_path: Path, mode: SaveMode, file_bytes: int) -> None:
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=384)
    weights, _ = on_ranks(2, save_and_train_on, tmp_path, mode, file_bytes)
    # DCP's own reader can read it too.
    found = load_checkpoint(tmp_path / "run", 7)["model"]
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    (manifest,) = RunDir(tmp_path / "run").manifests().values()
    sizes = [file.size for name, file in manifest.files.items() if name.endswith(".distcp")]
    assert len(sizes) == 2 if file_bytes == layout.FILE_BYTES else len(sizes) > 4
    assert max(sizes) <= file_bytes + 10_000, "expected tensors up to the limit and generators at the end"


def save_and_fail_to_close(folder: Path) -> int:
    """Return the committed step, although closing each part of the saver fails."""
    run = a_run(folder)
    saver = a_saver(run, "thread")
    save_at(run, saver, 7)
    with pytest.MonkeyPatch.context() as patch:
        for part in (saver._thread, saver._files._writer, saver._files._buffer):
            patch.setattr(part, "shutdown" if part is saver._thread else "close", fail)
        saver.close()
    saver._thread.shutdown()
    return max(run.session.run_dir.manifests())


def fail() -> None:
    raise OSError(5, "Input/output error")


def test_saver_close_error_does_not_fail_a_run_with_a_committed_last_save(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=384)
    assert on_ranks(1, save_and_fail_to_close, tmp_path) == [7]


def save_on_a_full_disk(folder: Path, mode: SaveMode) -> list[Any]:
    """Let the first and third saves fail on rank 1; return the results of the second save and of the end."""
    run = a_run(folder)
    saver = a_saver(run, mode)
    save.PATIENCE = 0.0
    found = []
    for step, full in ((1, True), (2, False), (3, True)):
        with _no_large_files() if full and dist.get_rank() == 1 else nullcontext():
            save_at(run, saver, step)
            found.append(saver.wait())
    try:
        saver.close()
    except CheckpointError as error:
        return [*found, str(error)]
    return [*found, None]


@contextmanager
def _no_large_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_failed_save_is_reported_on_every_rank_and_the_next_succeeds(tmp_path: Path, mode: SaveMode) -> None:
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=384)
    for first, second, third, last in on_ranks(2, save_on_a_full_disk, tmp_path, mode):
        assert "checkpoint of step 1 was not committed: rank 1: OSError: [Errno 27] File too large" in first
        assert second is None
        assert "checkpoint of step 3 was not committed" in third
        assert last == third
    run_dir = RunDir(tmp_path / "run")
    assert sorted(run_dir.manifests()) == [2]
    events = [(event["event"], event["step"]) for event in read_lines(run_dir.attempt(1).events)]
    assert events == [("checkpoint_failed", 1), ("checkpoint_committed", 2), ("checkpoint_failed", 3)]
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-00000002"], "files of a failed save remain"


def save_after_a_takeover(folder: Path) -> list[str]:
    """Return the errors of a save that finds a newer group, and of the loop that then asks for the reason."""
    run = a_run(folder)
    saver = a_saver(run)
    save_at(run, saver, 1)
    assert saver.wait() is None
    dist.barrier()
    if dist.get_rank() == 0:
        run.session.run_dir.write_fence(2)
    dist.barrier()
    save_at(run, saver, 2)
    found = []
    for fails in (saver.wait, saver.raise_fatal):
        with pytest.raises(FencedError) as raised:
            fails()
        found.append(str(raised.value))
    assert saver.failed_fatally
    return found


def test_save_after_a_takeover_raises_the_same_on_every_rank(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=384)
    reason = "attempt 2 has taken over from attempt 1, which stops"
    assert on_ranks(2, save_after_a_takeover, tmp_path) == [[reason, reason]] * 2
    run_dir = RunDir(tmp_path / "run")
    assert sorted(run_dir.manifests()) == [1]
    assert [event["event"] for event in read_lines(run_dir.attempt(1).events)] == ["checkpoint_committed"]


def resume_from_unreadable(folder: Path) -> list[str]:
    """Resume while rank 1 cannot read: briefly, permanently, or because of a disk error."""
    run = a_run(folder)
    saver = a_saver(run, "sync")
    for step in (1, 2):
        save_at(run, saver, step)
    saver.close()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for number, times in ((errno.ESTALE, 2), (errno.EACCES, 99), (errno.EIO, 99)):
            patch.setattr(session, "PATIENCE", 30.0 if times == 2 else 0.0)
            patch.setattr(select, "verify", unreadable(number, times))
            again = a_run(folder)
            try:
                train.resume(again)
                found.append(f"step {again.state.step}")
            except OSError as error:
                found.append(type(error).__name__)
            dist.barrier()
    return found


def unreadable(number: int, times: int) -> Callable[..., list[str]]:
    """Let verification of step 2 fail on rank 1 the given number of times."""
    left = iter(range(times))

    def verify_or_fail(path: Path, manifest: Manifest, names: list[str]) -> list[str]:
        if dist.get_rank() == 1 and manifest.step == 2 and next(left, None) is not None:
            raise OSError(number, os.strerror(number), str(path))
        return verify(path, manifest, names)

    return verify_or_fail


def test_temporary_read_error_is_not_taken_for_damage(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=384)
    assert on_ranks(2, resume_from_unreadable, tmp_path) == [["step 2", "PermissionError", "step 1"]] * 2
    (rejected,) = (e for e in read_lines(RunDir(tmp_path / "run").attempt(1).events) if e["event"].endswith("rejected"))
    assert (rejected["step"], "cannot be read: Input/output error" in rejected["reason"]) == (2, True)


def resume_with_an_unused_parameter(folder: Path) -> bool:
    """Save after a step in which one weight had no gradient, and thus no optimizer state; then resume."""
    run = a_run(folder)
    (optimizer,) = run.state.optimizers
    for name, weight in run.state.model.named_parameters():
        weight.grad = torch.ones_like(weight) if name != UNUSED else None
    optimizer.step()
    assert dict(run.state.model.named_parameters())[UNUSED] not in optimizer.state
    saver = a_saver(run)
    save_at(run, saver, 1)
    saver.close()
    again = a_run(folder)
    train.resume(again)
    (fresh,) = again.state.optimizers
    weights = dict(again.state.model.named_parameters())
    assert weights[UNUSED] not in fresh.state
    assert all(fresh.state[weight]["step"] == 1 for name, weight in weights.items() if name != UNUSED)
    return again.state.step == 1 and all(torch.equal(whole(again)[name], weight) for name, weight in whole(run).items())


UNUSED = "model.norm.weight"


def test_checkpoint_with_an_unused_weight_can_be_loaded(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=384)
    assert on_ranks(2, resume_with_an_unused_parameter, tmp_path) == [True, True]
