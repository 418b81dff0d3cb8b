"""Metrics of a run: speed, data wait, memory, the slowest rank, and profiles."""

import gc
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.builders.searches import drawn
from tests.support.builders.small_runs import BATCH, LENGTH, STEPS, events, job_of, lines, numbers, run
from tests.support.builders.specs import TINY, may_read
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop import train
from train_loop.data.dataset import Rows
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.build import Run, build_run
from train_loop.plan import MeshPlan
from train_loop.preflight.model import check_model
from train_loop.run_dir import RunDir
from train_loop.telemetry import flops

PROFILED, STALL, LAG = (2, 5), 0.6, 0.15
ULYSSES = {"ulysses_size": 2}
LAGGING: dict[str, dict[str, Any]] = {
    "lagging": {},
    "lagging, Ulysses": {"strategy": ULYSSES},
    # Nested units: the gathers of inner units overlap the computation of outer ones.
    "lagging, fp32 norms": {"strategy": {"norm_dtype": "fp32"}},
    "lagging, replicas": {"strategy": {"sharding_strategy": "NO_SHARD"}},
    "lagging, recomputed": {"model": {"gradient_checkpointing": "full"}},
}
LAGGING = {name: LAGGING[name] for name in ("lagging", *drawn([*LAGGING][1:], 2))}


def slow_stream(left: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
    """Return a stream whose rows rank 0, which reads for both, gets late in the second step."""
    for step, rows in enumerate(local_stream(left, mesh, rank), start=1):
        if rank == 0 and step == 2:
            time.sleep(STALL)
        yield rows


def lag(patch: pytest.MonkeyPatch) -> None:
    """Slow rank 1 down: MLPs in the second step's forward and the fourth step's backward, then an optimizer."""
    build = build_run

    def build_lagging(*arguments: Any) -> Run:
        run = build(*arguments)

        def sleep_in_backward(gradient: torch.Tensor) -> None:
            time.sleep(LAG)

        def slow_down(module: Any, inputs: Any, output: torch.Tensor) -> None:
            step = run.state.step + 1
            if run.mesh.rank == 1 and step == 2:
                time.sleep(LAG)
            if run.mesh.rank == 1 and step == 4:
                output.register_hook(sleep_in_backward)  # type: ignore[no-untyped-call]

        def sleep_in_optimizer(*_: Any) -> None:
            if run.mesh.rank == 1 and run.state.step + 1 == 6:
                time.sleep(3 * LAG)

        for layer in run.objective.anatomy.layers:
            layer.get_submodule("mlp").register_forward_hook(slow_down)
        run.state.optimizers[0].register_step_pre_hook(sleep_in_optimizer)
        return run

    patch.setattr(train, "build_run", build_lagging)


def stall(patch: pytest.MonkeyPatch) -> list[bool]:
    """Delay rank 1 after the third step; return for each step if garbage was collected automatically."""
    automatic = list[bool]()

    def collect(step: int) -> None:
        automatic.append(gc.isenabled())
        if dist.get_rank() == 1 and step == 3:
            time.sleep(STALL)

    patch.setattr(train, "collect_garbage", collect)
    return automatic


def all_runs(folder: Path) -> dict[str, Any]:
    """Run every case of this file on the same ranks, because starting ranks takes most of the time."""
    data = folder / "d.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "peak_flops", lambda device, dtype: 1e12)
        run(data, folder / "plain")
    run(
        data,
        folder / "profiled",
        profile_steps=[*PROFILED, STEPS + 1],
        num_train_epochs=STEPS * BATCH / 40,
        max_steps=None,
    )
    with pytest.MonkeyPatch.context() as patch:
        automatic = stall(patch)
        run(data, folder / "slow", strategy=ULYSSES, place={"open_stream": slow_stream})
    for name, parts in LAGGING.items():
        with pytest.MonkeyPatch.context() as patch:
            lag(patch)
            run(data, folder / name, **parts)
    stall_and_not(data, folder)
    return {"automatic": automatic, "after": gc.isenabled()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=40, length=LENGTH, vocab=TINY["vocab_size"])
    return folder


@pytest.fixture(scope="module", autouse=True)
def ranks(runs: Path) -> list[dict[str, Any]]:
    return on_ranks(2, all_runs, runs)


def test_speed_is_reported_per_worker_and_relative_to_the_peak(runs: Path) -> None:
    (start,) = events(runs / "plain", "training_started")
    stated = start["mfu"]
    assert stated["flops_per_token"] == 6 * stated["parameters"] + 12 * 2 * 4 * 8 * LENGTH
    assert stated["formula"] == "(6·N - 2·F + 12·L·d·s) · tokens/s per device ÷ peak"
    for line in lines(runs / "plain"):
        assert line["tokens_per_second"] == pytest.approx(BATCH * LENGTH / line["step_seconds"])
        assert line["tokens_per_second_per_worker"] == line["tokens_per_second"] / 2
        assert line["mfu"] == pytest.approx(stated["flops_per_token"] * line["tokens_per_second_per_worker"] / 1e12)
    assert {line["mfu"] for line in lines(runs / "slow")} == {None}
    assert events(runs / "slow", "training_started")[0]["mfu"]["peak_flops"] is None


def test_model_built_says_what_was_chosen(runs: Path) -> None:
    (built,) = events(runs / "slow", "model_built")
    assert (built["mesh"], list(built["hosts"].values())) == ({"fsdp": 2, "sp": 2}, [[0, 1]])
    assert {one["module"]: (one["count"], one["dtype"]) for one in built["units"]} == {
        "Embedding": (1, "fp32"),
        "Qwen3ForCausalLM": (1, "fp32"),
        "Qwen3DecoderLayer": (2, "fp32"),
        "Linear": (1, "fp32"),
    }
    shape, _ = check_model(job_of(runs / "d.parquet", 2, strategy=ULYSSES), may_read())
    assert shape is not None
    assert shape.built is not None
    assert [vars(one) for one in shape.built.units] == built["units"]
    assert shape.built.tree == built["tree"]
    assert (built["attention"], built["backend"], built["checkpointing"]) == ("sdpa", "gloo", "none")
    assert built["loss_chunk_tokens"] is None
    assert {group["optimizer"] for group in built["optimizer_groups"]} == {"AdamW"}
    assert built["cores"] >= 1
    assert built["parameters"] == built["trained_parameters"] == shape.parameters


def test_memory_is_that_of_the_largest_rank(runs: Path) -> None:
    for line in lines(runs / "plain"):
        assert line["peak_device_bytes"] is None
        assert 1e8 < line["peak_host_bytes"] < 1e11


def test_line_after_a_checkpoint_reports_the_blocking_time(runs: Path) -> None:
    blocked = {line["step"] for line in lines(runs / "plain") if line["checkpoint_blocked_seconds"] > 0}
    assert blocked == {4}


def test_rank_that_blocks_others_is_named(runs: Path) -> None:
    found = {line["step"]: line for line in lines(runs / "slow")}
    for step, slowest in {2: 0, 4: 1}.items():
        line = found[step]
        assert line["slowest_rank"] == slowest
        assert line["slowest_rank_seconds"] == line["rank_seconds"][slowest] > STALL
        assert line["rank_seconds"][1 - slowest] < line["rank_seconds"][slowest] - STALL / 2
    assert found[2]["data_wait_seconds"] > STALL


@pytest.mark.parametrize("name", LAGGING)
def test_slow_rank_is_named_if_others_wait_within_the_step(runs: Path, name: str) -> None:
    by_step = {line["step"]: line for line in lines(runs / name)}
    for step in (2, 4, 6):
        slow, other = by_step[step]["rank_seconds"][1], by_step[step]["rank_seconds"][0]
        assert by_step[step]["slowest_rank"] == 1
        assert slow - other > 2 * LAG, by_step[step]["rank_seconds"]


def test_no_rank_collects_garbage_automatically(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["automatic"] == [False] * STEPS
        assert rank["after"]


def test_profiled_steps_write_traces_of_every_rank_and_keep_the_loss(runs: Path) -> None:
    assert list(map(numbers, lines(runs / "profiled"))) == list(map(numbers, lines(runs / "plain")))
    assert [event["step"] for event in events(runs / "profiled", "profiled")] == list(PROFILED)
    found = {path.name for path in (RunDir(runs / "profiled").attempt(1).root / "profile").iterdir()}
    stems = {f"rank-0000{rank}-step-0000000{step}" for rank in (0, 1) for step in PROFILED}
    assert found == {f"{stem}.{ending}" for stem in stems for ending in ("trace.json", "memory.txt")}
    for step in PROFILED:
        trace = RunDir(runs / "profiled").attempt(1).profile(1, step, "trace.json")
        assert any(e.get("name") == "aten::mm" for e in json.loads(trace.read_text())["traceEvents"])
        assert "aten::" in trace.with_name(trace.name.replace("trace.json", "memory.txt")).read_text()
    assert not (RunDir(runs / "plain").attempt(1).root / "profile").exists()


def test_profile_of_an_unreachable_step_warns(runs: Path) -> None:
    (warning,) = events(runs / "profiled", "warning")
    assert warning["message"] == "profile_steps=[7] are beyond the 6 steps of the run; later steps are not profiled"


def stalled_stream(left: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
    """Return a stream whose rows all ranks get too late in the third step."""
    for step, rows in enumerate(local_stream(left, mesh, rank), start=1):
        if step == 3:
            time.sleep(1.5)
        yield rows


def stall_and_not(data: Path, folder: Path) -> None:
    patience = {"timeout": timedelta(seconds=1)}
    run(data, folder / "stalled", place={"open_stream": stalled_stream, **patience})
    with patch("train_loop.train.build_run", slow_build):
        run(data, folder / "late", place=patience)
    run(data, folder / "sound")


def slow_build(*arguments: Any) -> Run:
    """Build a model too slowly."""
    time.sleep(1.5)
    return build_run(*arguments)


def test_every_rank_writes_stacks_if_no_step_ends_in_time(runs: Path) -> None:
    for name, where in (("stalled", "in stalled_stream"), ("late", "in slow_build")):
        stacks = RunDir(runs / name).attempt(1).stacks
        for rank in range(2):
            assert where in (stacks / f"rank-{rank:05d}.txt").read_text()
    assert list(RunDir(runs / "sound").attempt(1).stacks.iterdir()) == []
