"""Parameter groups, Lion, Adam and schedule-free AdamW on ranks: the bits of one rank, resizes, clones and exports."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.builders.any_size import SHALLOW, STEPS, Case, differing, numbers, train_case, write_data
from tests.support.builders.small_runs import LENGTH, events, lines
from tests.support.builders.small_runs import STEPS as SHORT
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.ranks.torchrun import load_checkpoint, load_tensors, write_tokens
from train_loop.checkpoint.export.huggingface import export
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.batch import micro_batches
from train_loop.loop.build import build_run
from train_loop.loop.session import Session
from train_loop.loop.step import train_step
from train_loop.model.folder import model_shape
from train_loop.plan import plan_job
from train_loop.run_dir import ExportWish, Parent, RunDir
from train_loop.spec import JobSpec
from train_loop.telemetry.timers import StepTimer
from train_loop.train import next_batch, train

CallRanks = Callable[..., Any]
AT, EVERY = 3, 2
"""Step of the parent's checkpoint, and steps between evaluations."""
FREE = {"optimizer": "schedule_free_adamw", "lr_scheduler_type": "constant_with_warmup"}
GROUPS = [
    {"params": ["*embed_tokens*"], "lr_scale": 0.5, "weight_decay": 0.0},
    {"params": ["lm_head", "*.q_proj.*"], "learning_rate": 3e-3, "betas": [0.8, 0.95]},
]
CASES = {
    "lion": Case(SHALLOW, training={"optimizer": "lion", "groups": GROUPS, "layer_decay": 0.5, "ema_decay": 0.9}),
    "adam": Case(SHALLOW, training={"optimizer": "adam", "layer_decay": 0.5}),
    "schedule-free": Case(SHALLOW, training=FREE | {"groups": GROUPS, "warmup_steps": 2, "eval_steps": 2}),
}


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[CallRanks]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    write_tokens(folder / "train.parquet", rows=20, length=LENGTH, vocab=TINY["vocab_size"])
    write_tokens(folder / "held out.parquet", rows=5, length=LENGTH, vocab=TINY["vocab_size"])
    return folder


@pytest.mark.parametrize("name", CASES)
def test_run_resized_between_meshes_has_the_bits_of_one_rank(call_ranks: CallRanks, folder: Path, name: str) -> None:
    whole, first, rest = (folder / f"{name} {part}" for part in ("whole", "first", "rest"))
    call_ranks(1, train_case, folder, CASES[name], "1", RunDir(whole), 1, (STEPS, True))
    call_ranks(2, train_case, folder, CASES[name], "2", RunDir(first), 1, (2, True))
    shutil.copytree(RunDir(first).checkpoint(2), RunDir(rest).checkpoint(2))
    call_ranks(4, train_case, folder, CASES[name], "2x2", RunDir(rest), 1, (STEPS, True))
    assert len(numbers(whole)) == STEPS
    assert str([*numbers(first), *numbers(rest)]) == str(numbers(whole))
    assert differing(rest, whole) == []


def test_metrics_have_the_rate_of_each_group(call_ranks: CallRanks, folder: Path) -> None:
    if not (folder / "lion whole").exists():
        call_ranks(1, train_case, folder, CASES["lion"], "1", RunDir(folder / "lion whole"), 1, (STEPS, True))
    (start,) = events(folder / "lion whole", "training_started")
    groups = start["parameter_groups"]
    for line in lines(folder / "lion whole"):
        assert line["lr"] == line["lr_groups"][0]
        factor = line["lr"] / 1e-3
        assert line["lr_groups"] == pytest.approx([factor * group["lr"] for group in groups])
    assert {group["name"]: group["lr"] for group in groups} == {
        "after layers": 1e-3,
        "layer 0": 5e-4,
        "*embed_tokens*, before layers": 1.25e-4,
        "lm_head, *.q_proj.*, after layers": 3e-3,
        "lm_head, *.q_proj.*, layer 0": 3e-3,
    }


def free_job(folder: Path, strategy: dict[str, Any], training: dict[str, Any]) -> JobSpec:
    """Return the spec of a small schedule-free run, which is evaluated."""
    data = {"train": {"path": str(folder / "train.parquet")}, "eval": {"path": str(folder / "held out.parquet")}}
    settings = {"max_steps": SHORT, "global_batch_size": 4, "weight_decay": 0.1, "learning_rate": 1e-2}
    return spec(
        model={"dtype": "fp32", "gradient_checkpointing": "none"},
        data=data | {"columns": {"input_ids": "ids"}, "packing": False, "shuffle": False},
        training=FREE | settings | {"warmup_steps": 3, "eval_steps": EVERY} | training,
        strategy=strategy,
        checkpoint={"every_steps": AT},
        scaling={"num_workers": dist.get_world_size()},
    )


def train_free(folder: Path, name: str, strategy: dict[str, Any], training: dict[str, Any]) -> None:
    job = free_job(folder, strategy, training)
    dataset, run_dir = find_dataset(job, folder), RunDir(folder / name)
    other = evaluation_spec(job, dataset)
    assert other is not None
    if dist.get_rank() == 0:
        run_dir.write_spec(job)
    dist.barrier()
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, run_dir, local_stream)
    train(job, session, dataset, find_dataset(other, folder))


def continue_from(parent: Path, child: Path, *, same_optimizer: bool) -> None:
    """Write that a run begins at the parent's checkpoint."""
    manifest = RunDir(parent).manifests()[AT]
    RunDir(child).write_parent(
        Parent(
            job="job-parent",
            run_dir=str(parent),
            manifest=manifest,
            same_order=True,
            same_optimizer=same_optimizer,
            same_plateau=False,
        )
    )


@pytest.fixture(scope="module")
def free(call_ranks: CallRanks, folder: Path) -> Path:
    """Return the run directory of a schedule-free run on two ranks."""
    call_ranks(2, train_free, folder, "free", {}, {})
    return folder / "free"


def test_checkpoint_has_the_averages_as_its_model(free: Path) -> None:
    saved = load_checkpoint(free, SHORT)
    assert saved["trained"].keys() == saved["model"].keys()
    for name, y in saved["trained"].items():
        z = saved["optimizer"]["state"][name]["z"]
        torch.testing.assert_close(0.1 * z + 0.9 * saved["model"][name], y, rtol=1e-5, atol=1e-6)
        assert not torch.equal(saved["model"][name], y), name


def test_plan_counts_the_bytes_of_the_averages(free: Path) -> None:
    job = RunDir(free).spec().run
    tensors = load_tensors(free, SHORT)
    assert {name.split("/")[1] for name in tensors} == {"model", "trained", "optimizer"}
    saved = sum(tensor.nbytes for tensor in tensors.values() if tensor.ndim)
    assert plan_job(job, model_shape(job.model)).checkpoint_bytes == pytest.approx(saved, rel=0.01)


def test_evaluation_uses_the_averages(free: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    model.load_state_dict(load_checkpoint(free, SHORT)["model"])
    rows = torch.tensor(read_rows(free.parent / "held out.parquet"))
    with torch.no_grad():
        logits = model(rows).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert lines(free)[-1]["eval_loss"] == pytest.approx(float(loss), rel=1e-5)


def read_rows(file: Path) -> list[list[int]]:
    rows: list[list[int]] = pq.read_table(file)["ids"].to_pylist()
    return rows


def test_export_has_the_averages(free: Path) -> None:
    folder = export(RunDir(free), SHORT, ExportWish(dtype="fp32", weights="model"))
    exported = load_file(folder / "model.safetensors")
    for name, weight in load_checkpoint(free, SHORT)["model"].items():
        assert torch.equal(exported[name], weight), name


def test_clone_with_the_same_optimizer_goes_on_bit_equal(call_ranks: CallRanks, free: Path) -> None:
    continue_from(free, free.parent / "same", same_optimizer=True)
    call_ranks(2, train_free, free.parent, "same", {}, {})
    names = ("step", "loss", "grad_norm", "lr", "eval_loss")
    found, expected = (
        [[line.get(name) for name in names] for line in lines(run)] for run in (free.parent / "same", free)
    )
    assert found == expected[AT:]
    assert differing(free.parent / "same", free, SHORT) == []


def test_clone_with_another_optimizer_begins_at_the_averages(call_ranks: CallRanks, free: Path) -> None:
    adamw = {"optimizer": "adamw", "learning_rate": 1e-30, "weight_decay": 0.0}
    continue_from(free, free.parent / "adamw", same_optimizer=False)
    call_ranks(1, train_free, free.parent, "adamw", {}, adamw)
    begun = load_checkpoint(free, AT)["model"]
    final = load_checkpoint(free.parent / "adamw", SHORT)
    assert all(torch.equal(final["model"][name], weight) for name, weight in begun.items())
    # And back: averages begin at the weights of the parent.
    still = {"learning_rate": 1e-30, "weight_decay": 0.0, "max_steps": SHORT + 1}
    RunDir(free.parent / "back").write_parent(
        Parent(
            job="adamw",
            run_dir=str(free.parent / "adamw"),
            manifest=RunDir(free.parent / "adamw").manifests()[SHORT],
            same_order=True,
            same_optimizer=False,
            same_plateau=False,
        )
    )
    call_ranks(1, train_free, free.parent, "back", {}, still)
    final = load_checkpoint(free.parent / "back", SHORT + 1)
    for section in ("model", "trained"):
        assert all(torch.equal(final[section][name], weight) for name, weight in begun.items()), section


@pytest.mark.parametrize("policy", [True, "optimizer"])
def test_offloaded_states_have_the_same_bits(call_ranks: CallRanks, free: Path, policy: bool | str) -> None:
    call_ranks(2, train_free, free.parent, f"offload {policy}", {"offload_policy": policy}, {})
    assert differing(free.parent / f"offload {policy}", free, SHORT) == []


def skip_a_step(folder: Path) -> tuple[bool, bool, int, float]:
    """Train a step with infinite weights. Return whether it was applied, whether states exist, and the schedule."""
    job = free_job(folder, {}, {})
    session = Session(0, 1, 0, 1, RunDir(folder / "unused"), local_stream)
    run = build_run(job, session, find_dataset(job, folder))
    rows = local_stream(StreamPlan(run.dataset, run.order, 0, 1), run.mesh.plan, run.mesh.rank)
    batch = next_batch(run, rows, StepTimer())
    head, state = run.objective.anatomy.head, run.state
    assert head is not None
    with torch.no_grad():
        head.get_parameter("weight").fill_(torch.inf)
    micro = micro_batches(batch, 1, run.objective.anatomy, run.mesh)
    result = train_step(state, run.objective, micro, divisor=1, reduction=run.reduction, max_grad_norm=1.0)
    return result.applied, any(one.state for one in state.optimizers), state.schedulers[0].last_epoch, state.lr


def test_skipped_step_keeps_averages_and_warm_up(call_ranks: CallRanks, folder: Path) -> None:
    assert call_ranks(1, skip_a_step, folder) == (False, False, 0, pytest.approx(1e-2 / 3))
