"""Runs on a failing network file system and on object storage, compared with a run on a local disk.

test_kills, test_resume and test_saver test runs on a local disk.
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from service import ports
from service.adapters.storage.run_dirs import LocalRunDirs
from service.ports import Cursor, LogSource
from service.use_cases.runs.streams import Reader, read_page
from tests.support.builders.searches import drawn
from tests.support.builders.small_runs import STEPS, job_of, numbers, run
from tests.support.builders.specs import TINY
from tests.support.faults.nfs import act_like_nfs
from tests.support.ranks.ranks import on_ranks, ranks_to_kill
from tests.support.ranks.torchrun import write_tokens
from tests.support.servers.s3 import S3Server
from tests.support.servers.storage import bucket_of_runs, run_dir_on_s3
from tests.support.waiting import wait_for
from train_loop.checkpoint.export.huggingface import export
from train_loop.checkpoint.export.tensors import CheckpointTensors
from train_loop.checkpoint.files.writer import Files, OwnWriter
from train_loop.checkpoint.manifest import newest_verified, verify
from train_loop.data.dataset import Rows
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.plan import MeshPlan
from train_loop.run_dir import CheckpointFile, ExportWish, Outcome, RunDir, Stop, flush_all, read_lines, storage_failed
from train_loop.telemetry.logs import open_log

Place = Callable[[str], RunDir]
MODES = drawn(("thread", "process", "sync"), 1)
"""Ways to save; test_saving.py has all of them on a local disk."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with bucket_of_runs() as server:
        yield server


@pytest.fixture(scope="module")
def folder(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data, and a reference run on a local disk."""
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=64, length=32, vocab=TINY["vocab_size"])
    on_ranks(2, train, folder, RunDir(folder / "local"), "thread")
    return folder


@pytest.fixture(scope="module", params=drawn(["nfs", "s3"], 1))
def place(request: pytest.FixtureRequest, folder: Path) -> Place:
    """Return the location of run directories, by name."""
    if request.param == "s3":
        return run_dir_on_s3
    return lambda name: RunDir(folder / str(request.param) / name)


def train(folder: Path, run_dir: RunDir, mode: str, steps: int = STEPS) -> None:
    if "nfs" in run_dir.root.parts:
        act_like_nfs(run_dir.checkpoints, seed=dist.get_rank())
    run(
        folder / "d.parquet",
        folder,
        place={"run_dir": run_dir},
        strategy={"async_save_ckpt": mode},
        max_steps=steps,
        per_device_train_batch_size=2,
    )


def train_until_killed(folder: Path, run_dir: RunDir) -> None:
    """Train; rank 1 never writes its part of the second save."""
    write = OwnWriter.write

    def stall(writer: OwnWriter, place: Path, files: Files) -> dict[str, CheckpointFile]:
        if dist.get_rank() == 1 and place.name.startswith("step-00000006"):
            time.sleep(600)
        return write(writer, place, files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnWriter, "write", stall)
        train(folder, run_dir, "thread")


def train_into_outage(folder: Path, run_dir: RunDir, switch: Path) -> None:
    """Train; storage refuses requests from the end of step 2 on."""

    def stream(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
        for step, rows in enumerate(local_stream(plan, mesh, rank), start=1):
            if step == 3 and rank == 0:
                switch.touch()
            yield rows

    place = {"run_dir": run_dir, "open_stream": stream}
    strategy = {"async_save_ckpt": "thread"}
    run(folder / "d.parquet", folder, place=place, strategy=strategy, max_steps=STEPS, per_device_train_batch_size=2)


def events(run_dir: RunDir, name: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(run_dir.attempt(1).events) if line["event"] == name]


def weights(run_dir: RunDir, step: int) -> dict[str, torch.Tensor]:
    saved = CheckpointTensors(run_dir.checkpoint(step))
    pieces = {"model.model.embed_tokens.weight", "optimizer.state.model.norm.weight.exp_avg"}
    return {name: torch.cat([piece.values for piece in saved.pieces(name)]) for name in pieces}


def assert_same(run_dir: RunDir, local: RunDir) -> None:
    """Check that the newest checkpoint and every line equal the local run's, despite repeated steps."""
    newest, rejected = newest_verified(run_dir)
    assert newest is not None
    assert (newest.step, rejected) == (STEPS, {})
    for name, value in weights(local, STEPS).items():
        assert torch.equal(weights(run_dir, STEPS)[name], value), name
    expected = {line["step"]: numbers(line) for line in read_lines(local.attempt(1).metrics)}
    assert {line["step"]: numbers(line) for line in read_lines(run_dir.attempt(1).metrics)} == expected


def whole(folder: Path, place: Place, mode: str) -> RunDir:
    """Return the directory of a run that has ended."""
    run_dir = place(f"whole-{mode}")
    if not run_dir.manifests():
        on_ranks(2, train, folder, run_dir, mode)
    return run_dir


@pytest.mark.parametrize("mode", MODES)
def test_run_equals_the_run_on_a_local_disk(folder: Path, place: Place, mode: str) -> None:
    run_dir = whole(folder, place, mode)
    assert sorted(run_dir.manifests()) == [3, 6]
    assert_same(run_dir, RunDir(folder / "local"))


def test_run_killed_during_a_save_resumes_and_leaves_nothing(folder: Path, place: Place) -> None:
    run_dir = place("killed")
    with ranks_to_kill(2, train_until_killed, folder, run_dir) as ranks:
        wait_for(lambda: list(run_dir.checkpoints.glob("step-00000006*/*")), "a file of the second save")
        for rank in ranks:
            rank.kill()
    on_ranks(2, train, folder, run_dir, "thread")
    assert {path.name for path in run_dir.checkpoints.iterdir()} == {"step-00000003", "step-00000006"}
    for step, manifest in run_dir.manifests().items():
        there = {path.name for path in run_dir.checkpoint(step).iterdir()}
        assert there == {*manifest.files, "manifest.json"}
    assert_same(run_dir, RunDir(folder / "local"))


def test_outage_delays_a_save_and_is_reported(folder: Path, server: S3Server) -> None:
    run_dir, before = run_dir_on_s3("outage"), server.refused

    def be_back() -> None:
        wait_for(lambda: server.refused > before, "a request is refused")
        time.sleep(4)
        server.switch.unlink()

    outage = threading.Thread(target=be_back)
    outage.start()
    on_ranks(2, train_into_outage, folder, run_dir, server.switch)
    outage.join()
    (delayed, *_) = events(run_dir, "checkpoint_delayed")
    assert delayed["step"] == 3
    assert [event["step"] for event in events(run_dir, "checkpoint_committed")] == [3, 6]
    assert_same(run_dir, RunDir(folder / "local"))


def test_outage_does_not_make_a_checkpoint_invalid(folder: Path, server: S3Server) -> None:
    """Check both resume and verification: unavailable files are not missing files."""
    run_dir = whole(folder, run_dir_on_s3, "thread")
    manifest = run_dir.manifests()[STEPS]
    with server.refuse():
        for read in (run_dir.manifests, partial(verify, run_dir.checkpoint(STEPS), manifest)):
            with pytest.raises(Exception, match=r"reduce your request rate|Service Unavailable") as refused:
                read()
            assert storage_failed(refused.value)
    outage = threading.Thread(target=refuse_for, args=(server, 4))
    outage.start()
    on_ranks(2, train, folder, run_dir, "thread")
    outage.join()
    assert events(run_dir, "checkpoint_rejected") == []
    assert events(run_dir, "training_started")[-1]["resumed_from"] == STEPS
    assert_same(run_dir, RunDir(folder / "local"))


def refuse_for(server: S3Server, seconds: float) -> None:
    """Refuse requests until refusals have lasted the given time."""
    before = server.refused
    with server.refuse():
        wait_for(lambda: server.refused > before, "a request is refused")
        time.sleep(seconds)


def test_damaged_checkpoint_is_skipped_with_an_event(folder: Path, place: Place) -> None:
    run_dir = whole(folder, place, "process")
    shard = next(iter(run_dir.checkpoint(6).glob("__1_*")))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    on_ranks(2, train, folder, run_dir, "thread")
    (rejected,) = events(run_dir, "checkpoint_rejected")
    assert (rejected["step"], rejected["reason"]) == (
        6,
        f"{shard.name} has another SHA-256 than when it was committed",
    )
    assert [event["resumed_from"] for event in events(run_dir, "training_started")] == [0, 3]
    assert_same(run_dir, RunDir(folder / "local"))


def test_stop_request_ends_the_run(folder: Path, place: Place) -> None:
    run_dir = place("stopped")

    def request_stop() -> None:
        wait_for(lambda: any(line["step"] >= 4 for line in read_lines(run_dir.attempt(1).metrics)), "step 4")
        run_dir.write_stop(Stop(mode="cancel"))

    requester = threading.Thread(target=request_stop)
    requester.start()
    on_ranks(2, train, folder, run_dir, "thread", 100_000)
    requester.join()
    (end,) = events(run_dir, "training_ended")
    assert end["result"] == "cancelled"
    assert max(run_dir.manifests()) == end["step"]


def test_service_reads_the_run(folder: Path, place: Place) -> None:
    run_dir, dirs = whole(folder, place, "thread"), LocalRunDirs()
    uri = str(run_dir.root)
    reader = Reader(dirs, uri, LogSource("metrics"))
    first, _ = read_page(reader, Cursor(), 4)
    rest, _ = read_page(reader, first[-1].cursor, 100)
    assert [one.line["step"] for one in [*first, *rest]] == list(range(1, STEPS + 1))
    assert [checkpoint.manifest.step for checkpoint in dirs.checkpoints(uri)] == [3, 6]
    progress = dirs.summary(uri).progress
    assert progress is not None
    assert progress.step == STEPS
    run_dir.attempt(1).write_outcome(Outcome(result="succeeded", step=STEPS))
    sighting = dirs.observe(uri, 1)
    assert sighting.outcome is not None
    with open_log(run_dir.attempt(1).rank_log(0)) as file:
        file.write("one\ntwo\nthr")
    flush_all()
    tail = dirs.tail(uri, LogSource("log", rank=0), ports.LogOffset(1, 4))
    assert [(entry.text, entry.after) for entry in tail.entries] == [("two", ports.LogOffset(1, 8))]


def test_checkpoints_of_the_run_are_exported(folder: Path, place: Place) -> None:
    run_dir = whole(folder, place, "thread")
    run_dir.write_spec(job_of(folder / "d.parquet", 2))
    exported = export(run_dir, 6, ExportWish(dtype="fp32"), shard_bytes=100_000)
    (event,) = (line for line in read_lines(run_dir.attempt(1).events) if line["event"] == "exported")
    assert (event["step"], event["folder"]) == (6, str(exported))
    files = sorted(path.name for path in exported.iterdir())
    assert files[:2] == ["config.json", "generation_config.json"]
    assert len([name for name in files if name.startswith("model-")]) > 1
    local = RunDir(folder / "local")
    local.write_spec(job_of(folder / "d.parquet", 2))
    on_disk = export(local, 6, ExportWish(dtype="fp32"), shard_bytes=100_000)
    for name in files:
        assert (exported / name).read_bytes() == (on_disk / name).read_bytes(), name
