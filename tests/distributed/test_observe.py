"""What a run tells of itself: speed, waiting, memory, profiles; and what it does with steps that are not finite."""

import gc
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import on_ranks
from tests.support.specs import TINY, spec
from tests.support.torchrun import load_checkpoint, write_tokens
from train_loop import assemble, flops, worker
from train_loop.assemble import Run
from train_loop.data.cache import find_dataset
from train_loop.data.dataset import Rows
from train_loop.data.reader import StreamPlan, local_stream
from train_loop.errors import NonFiniteError
from train_loop.plan import MeshPlan
from train_loop.run_dir import RunDir, read_lines
from train_loop.session import Session

STEPS, BATCH, LENGTH = 6, 4, 32
POISONED, PROFILED, STALL, LAG = 3, (2, 5), 0.6, 0.15
ULYSSES = {"ulysses_size": 2}
LAGGING: dict[str, dict[str, Any]] = {
    "lagging": {},
    "lagging, Ulysses": {"strategy": ULYSSES},
    # Units within units, whose gathers are within what the outer ones compute.
    "lagging, fp32 norms": {"strategy": {"norm_dtype": "fp32"}},
    "lagging, replicas": {"strategy": {"sharding_strategy": "NO_SHARD"}},
    "lagging, recomputed": {"model": {"gradient_checkpointing": "full"}},
}


def run(
    data: Path, folder: Path, *, slow: Any = local_stream, model: Any = None, strategy: Any = None, **training: Any
) -> None:
    """A run in a folder."""
    job = spec(
        model={"config": TINY, "dtype": "fp32", "gradient_checkpointing": "none"} | (model or {}),
        data={"train": {"path": str(data)}, "columns": {"input_ids": "ids"}, "packing": False, "shuffle": False},
        training={"max_steps": STEPS, "global_batch_size": BATCH, "audit_samples": True, "weight_decay": 0.1}
        # A schedule that depends on the steps done, and not on those to come.
        | {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}
        | training,
        strategy=strategy or {},
        checkpoint={"every_steps": 3},
        scaling={"num_workers": dist.get_world_size()},
    )
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder), slow)
    worker.train(job, session, find_dataset(job, folder))


def poison(patch: pytest.MonkeyPatch, *, first: int, last: int) -> None:
    """Let the embeddings of rank 1 give NaN in some steps."""
    build = assemble.build_run

    def build_poisoned(*arguments: Any) -> Run:
        run = build(*arguments)

        def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output * math.nan if run.mesh.rank == 1 and first <= run.state.step + 1 <= last else output

        run.state.model.get_input_embeddings().register_forward_hook(spoil)
        return run

    patch.setattr(worker, "build_run", build_poisoned)


def slow_stream(left: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
    """Rows that rank 0, who reads for both, gets late in the second step."""
    for step, rows in enumerate(local_stream(left, mesh, rank), start=1):
        if rank == 0 and step == 2:
            time.sleep(STALL)
        yield rows


def lag(patch: pytest.MonkeyPatch) -> None:
    """Let rank 1 compute slowly: MLPs in the second step's forward and the fourth one's backward, then an optimizer."""
    build = assemble.build_run

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

        for layer in run.state.model.model.layers:
            layer.mlp.register_forward_hook(slow_down)
        run.state.optimizers[0].register_step_pre_hook(sleep_in_optimizer)
        return run

    patch.setattr(worker, "build_run", build_lagging)


def stall(patch: pytest.MonkeyPatch) -> list[bool]:
    """Let rank 1 lose time after the third step; whether garbage was collected automatically then, by step."""
    automatic = list[bool]()

    def collect(step: int) -> None:
        automatic.append(gc.isenabled())
        if dist.get_rank() == 1 and step == 3:
            time.sleep(STALL)

    patch.setattr(worker, "collect_garbage", collect)
    return automatic


def said_by_endless_skips(data: Path, folder: Path, **parts: Any) -> str:
    try:
        run(data, folder, **parts)
    except NonFiniteError as error:
        return str(error)
    return ""


def all_runs(folder: Path) -> dict[str, Any]:
    """Every run of this file on the same ranks, because starting ranks is what takes the time."""
    data, without = folder / "d.parquet", folder / "without.parquet"
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
    run(without, folder / "without", max_steps=STEPS - 1)
    with pytest.MonkeyPatch.context() as patch:
        automatic = stall(patch)
        run(data, folder / "slow", strategy=ULYSSES, slow=slow_stream)
    for name, parts in LAGGING.items():
        with pytest.MonkeyPatch.context() as patch:
            lag(patch)
            run(data, folder / name, **parts)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, first=POISONED, last=POISONED)
        run(data, folder / "poisoned", max_consecutive_skips=2)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, first=3, last=99)
        failing = [
            said_by_endless_skips(data, folder / f"failing {dtype}", model={"dtype": dtype}, on_nonfinite="fail")
            for dtype in ("fp32", "fp16")
        ]
        first = said_by_endless_skips(data, folder / "endless", max_consecutive_skips=3, max_steps=4)
        resumed = said_by_endless_skips(data, folder / "endless", max_consecutive_skips=3)
    return {"automatic": automatic, "after": gc.isenabled(), "fail": failing, "first": first, "resumed": resumed}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=40, length=LENGTH, vocab=TINY["vocab_size"])
    rows = pq.read_table(folder / "d.parquet")
    kept = [row for row in range(40) if row // BATCH != POISONED - 1]
    pq.write_table(rows.take(kept), folder / "without.parquet")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return on_ranks(2, all_runs, folder)


@pytest.fixture(scope="module")
def runs(folder: Path, ranks: Any) -> Path:
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(RunDir(folder).attempt(1).metrics))


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(RunDir(folder).attempt(1).events) if line["event"] == name]


def numbers(line: dict[str, Any]) -> list[Any]:
    return [line[name] for name in ("loss", "grad_norm", "lr")]


def test_speed_is_told_per_worker_and_as_a_share_of_the_stated_peak(runs: Path) -> None:
    (start,) = events(runs / "plain", "training_started")
    stated = start["mfu"]
    assert stated["flops_per_token"] == 6 * stated["parameters"] + 12 * 2 * 4 * 8 * LENGTH
    assert stated["formula"] == "(6·N + 12·L·d·s) · tokens/s per device ÷ peak"
    for line in lines(runs / "plain"):
        assert line["tokens_per_second"] == pytest.approx(BATCH * LENGTH / line["step_seconds"])
        assert line["tokens_per_second_per_worker"] == line["tokens_per_second"] / 2
        assert line["mfu"] == pytest.approx(stated["flops_per_token"] * line["tokens_per_second_per_worker"] / 1e12)
    assert {line["mfu"] for line in lines(runs / "slow")} == {None}
    assert events(runs / "slow", "training_started")[0]["mfu"]["peak_flops"] is None


def test_memory_is_that_of_the_rank_that_took_most(runs: Path) -> None:
    for line in lines(runs / "plain"):
        assert line["peak_device_bytes"] is None
        assert 1e8 < line["peak_host_bytes"] < 1e11


def test_the_line_after_a_checkpoint_tells_how_long_it_held_the_loop_up(runs: Path) -> None:
    blocked = {line["step"] for line in lines(runs / "plain") if line["checkpoint_blocked_seconds"] > 0}
    assert blocked == {4}


def test_the_rank_that_others_wait_for_is_named(runs: Path) -> None:
    found = {line["step"]: line for line in lines(runs / "slow")}
    for step, slowest in {2: 0, 4: 1}.items():
        line = found[step]
        assert line["slowest_rank"] == slowest
        assert line["slowest_rank_seconds"] == line["rank_seconds"][slowest] > STALL
        assert line["rank_seconds"][1 - slowest] < line["rank_seconds"][slowest] - STALL / 2
    assert found[2]["data_wait_seconds"] > STALL


@pytest.mark.parametrize("name", LAGGING)
def test_the_rank_that_computes_slowly_is_named_although_others_wait_for_it_inside_the_step(
    runs: Path, name: str
) -> None:
    told = {line["step"]: line for line in lines(runs / name)}
    for step in (2, 4, 6):
        slow, other = told[step]["rank_seconds"][1], told[step]["rank_seconds"][0]
        assert told[step]["slowest_rank"] == 1
        assert slow - other > 2 * LAG, told[step]["rank_seconds"]


def test_no_rank_collects_garbage_on_its_own(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["automatic"] == [False] * STEPS
        assert rank["after"]


def test_profiled_steps_leave_trace_and_memory_of_every_rank_and_change_no_loss(runs: Path) -> None:
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


def test_a_step_to_profile_that_will_not_come_is_warned_of(runs: Path) -> None:
    (warning,) = events(runs / "profiled", "warning")
    assert warning["message"] == "profile_steps=[7] lie beyond the 6 steps of the run; later steps are not profiled"


def test_a_skipped_step_is_as_if_its_samples_had_never_been(runs: Path) -> None:
    found, expected = lines(runs / "poisoned"), lines(runs / "without")
    assert found[POISONED - 1]["loss"] is None
    kept = [line for line in found if line["step"] != POISONED]
    assert list(map(numbers, kept)) == list(map(numbers, expected))
    ours, theirs = load_checkpoint(runs / "poisoned", STEPS), load_checkpoint(runs / "without", STEPS - 1)
    assert ours["scheduler"] == theirs["scheduler"]
    for name, weight in theirs["model"].items():
        assert torch.equal(ours["model"][name], weight), name
        for moment, value in theirs["optimizer"]["state"][name].items():
            assert torch.equal(ours["optimizer"]["state"][name][moment], value), (name, moment)


def test_a_skipped_step_takes_its_samples_from_the_order(runs: Path) -> None:
    for line in lines(runs / "poisoned"):
        assert line["samples"] == list(range(BATCH * (line["step"] - 1), BATCH * line["step"]))
        assert line["tokens"] == BATCH * LENGTH * line["step"]
    (skipped,) = events(runs / "poisoned", "step_skipped")
    assert (skipped["step"], skipped["loss"], skipped["in_a_row"]) == (POISONED, None, 1)


def test_the_first_step_that_is_not_finite_can_fail_the_run(ranks: list[dict[str, Any]]) -> None:
    said = "step=3, loss=nan, grad_norm=nan is not finite; lower learning_rate, or choose on_nonfinite: skip"
    # A loss that is not finite is not for fp16's scaler to mend.
    assert [rank["fail"] for rank in ranks] == [[said, said]] * 2


def test_skips_in_a_row_fail_the_run_on_all_ranks_and_are_counted_across_a_restart(ranks: list[dict[str, Any]]) -> None:
    assert {rank["first"] for rank in ranks} == {""}
    assert {rank["resumed"] for rank in ranks} == {
        "step=5, loss=nan, grad_norm=nan is not finite, and max_consecutive_skips=3 steps were skipped in a row; lower "
        "learning_rate, look at the data of these steps, or start from weights that are finite"
    }
