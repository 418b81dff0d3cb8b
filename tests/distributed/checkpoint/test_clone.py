"""A run that continues from another run's checkpoint: inherited state and new hyperparameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.builders import small_runs
from tests.support.builders.small_runs import BATCH, LENGTH, STEPS, numbers
from tests.support.builders.specs import TINY, may_read
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop.errors import UserError
from train_loop.preflight.model import check_model
from train_loop.run_dir import Parent, RunDir
from train_loop.spec import ModelSpec

AT = 3
"""The step of the parent's checkpoint, in the middle of its run."""
DROPOUT = {"config": TINY | {"attention_dropout": 0.1}}


def go_on(
    folder: Path, name: str, *, same_order: bool = True, same_optimizer: bool = True, torch: str | None = None
) -> Path:
    """Return a run directory whose run continues from the parent's checkpoint, written with a version of torch."""
    manifest = RunDir(folder / "parent").manifests()[AT]
    if torch is not None:
        manifest = manifest.model_copy(update={"versions": manifest.versions | {"torch": torch}})
    heir = Parent(
        job="job-parent",
        run_dir=str(folder / "parent"),
        manifest=manifest,
        same_order=same_order,
        same_optimizer=same_optimizer,
    )
    RunDir(folder / name).write_parent(heir)
    return folder / name


@contextmanager
def no_initial_weights() -> Iterator[None]:
    """Fail if weights are drawn or read from a folder."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are drawn or read, and a checkpoint replaces them")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("build.draw_weights", "load.draw_weights", "load.fill"):
            patch.setattr(f"train_loop.model.{name}", fail)
        yield


def train_all(folder: Path) -> None:
    data, other = folder / "d.parquet", folder / "other.parquet"
    small_runs.run(data, folder / "parent", model=DROPOUT)
    with no_initial_weights():
        small_runs.run(data, go_on(folder, "same"), model=DROPOUT)
        small_runs.run(data, go_on(folder, "longer"), model=DROPOUT, max_steps=STEPS + 2)
    changed: dict[str, Any] = {
        "learning_rate": 5e-4,
        "weight_decay": 0.0,
        "ema_decay": 0.5,
        "lr_scheduler_type": "constant",
    }
    small_runs.run(data, go_on(folder, "changed"), model=DROPOUT, **changed, warmup_steps=0)
    small_runs.run(data, go_on(folder, "sgd", same_optimizer=False), model=DROPOUT, optimizer="sgd")
    small_runs.run(data, go_on(folder, "batch", torch="1.0"), model=DROPOUT, global_batch_size=2 * BATCH)
    small_runs.run(other, go_on(folder, "other"), model=DROPOUT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=20, length=LENGTH, vocab=TINY["vocab_size"])
    write_tokens(folder / "other.parquet", rows=24, length=LENGTH, vocab=TINY["vocab_size"])
    on_ranks(2, train_all, folder)
    return folder


def test_clone_with_the_same_spec_is_bit_equal(folder: Path) -> None:
    """With dropout, so that generators must be restored too, as well as schedule, moments and data position."""
    parent = {line["step"]: line for line in small_runs.lines(folder / "parent")}
    for name in ("same", "longer"):
        found = small_runs.lines(folder / name)
        assert [line["step"] for line in found] == list(range(AT + 1, STEPS + 1 + 2 * (name == "longer")))
        for line in found[: STEPS - AT]:
            expected = parent[line["step"]]
            assert numbers(line) == numbers(expected), f"step {line['step']} of {name}"
            assert (line["tokens"], line["samples"]) == (expected["tokens"], expected["samples"])
    weights, expected = (load_checkpoint(folder / name, STEPS) for name in ("same", "parent"))
    assert all(torch.equal(weights["model"][name], value) for name, value in expected["model"].items())


def test_clone_reports_its_parent_checkpoint(folder: Path) -> None:
    expected = {"job": "job-parent", "step": AT, "consumed": AT * BATCH, "same_optimizer": True}
    (event,) = small_runs.events(folder / "same", "continued")
    assert expected.items() <= event.items()
    (start,) = small_runs.events(folder / "same", "training_started")
    assert (start["resumed_from"], start["replayed"]) == (AT, 0)


def test_clone_uses_the_hyperparameters_of_its_spec(folder: Path) -> None:
    lines = small_runs.lines(folder / "changed")
    assert [line["lr"] for line in lines] == [5e-4] * (STEPS - AT)
    # The first step starts from the same weights, with the same generators.
    (parent,) = [line for line in small_runs.lines(folder / "parent") if line["step"] == AT + 1]
    assert lines[0]["loss"] == parent["loss"]
    groups = small_runs.events(folder / "changed", "training_started")[0]["parameter_groups"]
    assert {group["weight_decay"] for group in groups} == {0.0}
    saved = load_checkpoint(folder / "changed", STEPS)
    assert {group["weight_decay"] for group in saved["optimizer"]["param_groups"]} == {0.0}


def test_average_missing_in_the_parent_starts_at_its_weights(folder: Path) -> None:
    begun = load_checkpoint(folder / "parent", AT)["model"]
    saved = load_checkpoint(folder / "changed", STEPS)
    for name, average in saved["ema"].items():
        # After three steps with factor one half, an eighth of the average is still the initial weights.
        spread = (saved["model"][name] - begun[name]).norm()
        assert (average - begun[name]).norm() <= 2 * spread + 1e-6, name


def test_another_optimizer_starts_fresh(folder: Path) -> None:
    (parent,) = [line for line in small_runs.lines(folder / "parent") if line["step"] == AT + 1]
    lines = small_runs.lines(folder / "sgd")
    assert (lines[0]["loss"], lines[0]["lr"]) == (parent["loss"], parent["lr"])
    assert [line["step"] for line in lines] == [4, 5, 6]


def test_max_steps_counts_the_steps_of_the_parent_at_any_batch_size(folder: Path) -> None:
    lines = small_runs.lines(folder / "batch")
    assert [line["step"] for line in lines] == [4, 5, 6]
    taken = [sample for line in lines for sample in line["samples"]]
    assert sorted(taken) == sorted(sample % 20 for sample in range(AT * BATCH, AT * BATCH + 3 * 2 * BATCH))


def test_checkpoint_of_another_torch_is_warned_of(folder: Path) -> None:
    (warning,) = small_runs.events(folder / "batch", "warning")
    assert warning["message"].startswith(f"the checkpoint of step {AT} was written with torch 1.0, and torch ")
    assert small_runs.events(folder / "same", "warning") == []


def test_other_data_starts_at_its_beginning(folder: Path) -> None:
    lines = small_runs.lines(folder / "other")
    assert [line["step"] for line in lines] == [4, 5, 6]
    assert [line["samples"] for line in lines] == [list(range(n * BATCH, (n + 1) * BATCH)) for n in range(3)]
    (event,) = small_runs.events(folder / "other", "continued")
    assert event["consumed"] == 0


def goes_on_alone(folder: Path, name: str, part: dict[str, Any]) -> None:
    with no_initial_weights():
        small_runs.run(folder / "d.parquet", folder / name, **part)


def test_clone_with_another_number_of_ranks_inherits_the_same_state(folder: Path) -> None:
    go_on(folder, "alone")
    on_ranks(1, goes_on_alone, folder, "alone", {"model": {"config": TINY | {"attention_dropout": 0.0}}})
    assert [line["step"] for line in small_runs.lines(folder / "alone")] == [4, 5, 6]
    # Without dropout the first loss differs; the samples are the same.
    parent = {line["step"]: line["samples"] for line in small_runs.lines(folder / "parent")}
    assert all(line["samples"] == parent[line["step"]] for line in small_runs.lines(folder / "alone"))


def test_clone_resumes_from_its_own_checkpoint_once_committed(folder: Path) -> None:
    before = small_runs.lines(folder / "longer")
    on_ranks(2, goes_on_alone, folder, "longer", {"model": DROPOUT, "max_steps": STEPS + 3})
    starts = small_runs.events(folder / "longer", "training_started")
    assert [start["resumed_from"] for start in starts] == [AT, STEPS + 2]
    assert len(small_runs.events(folder / "longer", "continued")) == 1
    assert [line["step"] for line in small_runs.lines(folder / "longer")[len(before) :]] == [STEPS + 3]


def test_mismatched_model_is_rejected_before_training(folder: Path) -> None:
    parent = RunDir(go_on(folder, "looked-at")).parent()
    for config, difference in (
        (TINY, None),
        (TINY | {"intermediate_size": 96}, "model.layers.0.mlp.gate_proj.weight is [96, 32] and was [48, 32], and "),
        (TINY | {"num_hidden_layers": 1}, "model.layers.1.self_attn.q_proj.weight is missing now, and "),
        (TINY | {"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is [32, 32] and was missing, and "),
    ):
        job = small_runs.job_of(folder / "d.parquet", 2).model_copy(update={"model": ModelSpec(config=config)})
        _, problems = check_model(job, may_read(f"file://{folder}"), parent)
        assert [problem.pointer for problem in problems] == ([] if difference is None else ["/model/config"])
        for problem in problems:
            assert f"the model differs from the checkpoint of step 3 of job-parent: {difference}" in problem.message


def test_damaged_parent_checkpoint_is_reported_and_nothing_is_trained(folder: Path) -> None:
    parent = RunDir(folder / "parent")
    shard = next(parent.checkpoint(AT).glob("__0_*"))
    whole = shard.read_bytes()
    run_dir = go_on(folder, "damaged")
    try:
        shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(Exception, match="step 3 of job-parent, from which this run starts, is damaged") as caught:
            on_ranks(1, goes_on_alone, folder, "damaged", {"model": DROPOUT})
    finally:
        shard.write_bytes(whole)
    assert UserError.__name__ in str(caught.value)
    assert "has another SHA-256 than when it was committed; clone the job from another checkpoint" in str(caught.value)
    assert not small_runs.lines(run_dir)
