"""Saving beside the loop: a checkpoint holds the values of its step, whatever training does meanwhile."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.ranks import on_ranks
from tests.support.specs import spec
from tests.support.torchrun import write_tokens
from train_loop.assemble import Run, build_run
from train_loop.checkpoint.contents import draft_manifest, tensors_to_save
from train_loop.checkpoint.load import restore
from train_loop.checkpoint.save import SaveError, Saver
from train_loop.data.cache import find_dataset
from train_loop.data.reader import local_stream
from train_loop.run_dir import RunDir, read_lines
from train_loop.session import Session


def a_run(folder: Path) -> Run:
    """A run of one tiny model over all ranks."""
    job = spec(
        data={"train": {"path": str(folder / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
        scaling={"num_workers": dist.get_world_size()},
    )
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder / "run"), local_stream)
    return build_run(job, session, find_dataset(job, folder))


def a_saver(run: Run, *, asynchronous: bool = True) -> Saver:
    return Saver(run.session, run.journal, 2, asynchronous=asynchronous)


def whole(run: Run) -> dict[str, Tensor]:
    """All weights, gathered."""
    parameters = run.state.model.named_parameters()
    return {name: p.full_tensor().clone() if isinstance(p, DTensor) else p.clone() for name, p in parameters}


def save_and_train_on(folder: Path) -> bool:
    run = a_run(folder)
    before = whole(run)
    saver = a_saver(run)
    run.state.step = 7
    saver.save(tensors_to_save(run), draft_manifest(run))
    with torch.no_grad():
        for parameter in run.state.model.parameters():
            parameter.zero_()
    saver.close()
    other = a_run(folder)
    restore(other)
    return other.state.step == 7 and all(torch.equal(whole(other)[name], weight) for name, weight in before.items())


def test_a_checkpoint_holds_the_step_it_was_taken_at(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=384)
    assert on_ranks(2, save_and_train_on, tmp_path) == [True, True]


def save_on_a_full_disk(folder: Path, asynchronous: bool) -> list[Any]:
    """One rank's disk is full at the first save; what the second save and the end say."""
    run = a_run(folder)
    saver = a_saver(run, asynchronous=asynchronous)
    tensors = tensors_to_save(run)
    if dist.get_rank() == 1:
        tensors["fault"] = _Unwritable()
    run.state.step = 1
    saver.save(tensors, draft_manifest(run))
    first = saver.wait()
    run.state.step = 2
    saver.save(tensors_to_save(run), draft_manifest(run))
    second = saver.wait()
    run.state.step = 3
    saver.save(tensors, draft_manifest(run))
    try:
        saver.close()
    except SaveError as error:
        return [first, second, str(error)]
    return [first, second, None]


class _Unwritable:
    """A value whose writing fails as on a full disk."""

    def __reduce__(self) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Unwritable":
        return self


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_save_is_told_on_every_rank_and_the_next_one_succeeds(tmp_path: Path, asynchronous: bool) -> None:
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=384)
    for first, second, last in on_ranks(2, save_on_a_full_disk, tmp_path, asynchronous):
        assert "checkpoint of step 1 was not committed" in first
        assert "No space left on device" in first
        assert second is None
        assert "checkpoint of step 3 was not committed" in last
    run_dir = RunDir(tmp_path / "run")
    assert sorted(run_dir.manifests()) == [2]
    events = [(event["event"], event["step"]) for event in read_lines(run_dir.attempt(1).events)]
    assert events == [("checkpoint_failed", 1), ("checkpoint_committed", 2), ("checkpoint_failed", 3)]
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-00000002"], "what failed was left behind"
