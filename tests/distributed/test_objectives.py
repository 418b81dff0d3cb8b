"""An objective whose loss alone counts the divisor, and its named sums, equal plain PyTorch at every order of sums."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.amp import GradScaler

from tests.support.builders.reference import reference
from tests.support.builders.small_runs import LENGTH, STEPS, events, lines, run
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.counted_loss import CountedLoss
from tests.support.ranks.gradients import build, my_share, random_rows
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.conformance.measure import whole
from train_loop.data.dataset import IGNORE
from train_loop.errors import UserError
from train_loop.loop.batch import MicroBatch, StepBatch, micro_batches
from train_loop.loop.objectives.objective import LINE_FIELDS, Terms
from train_loop.loop.reduction import build_reduction
from train_loop.loop.step import accumulate
from train_loop.model.folder import model_shape
from train_loop.plan import plan_job
from train_loop.spec import JobSpec

TREE = {"reproducible": "any_size", "reduction_tree": {"max_shards": 2, "max_replicas": 1}}
ORDERS: dict[str, dict[str, Any]] = {"plain": {}, "ordered": TREE}


class Renamed(CountedLoss):
    """Sums under a name that the metrics line already has."""

    sums = ("grad_norm",)


class Unstated(CountedLoss):
    """Sums that the objective does not state."""

    sums = ()


class CountedTwice(CountedLoss):
    """A count with the batch and with the loss."""

    def divisor(self, batch: StepBatch) -> Tensor | None:
        return (batch.labels != IGNORE).sum()


class Uncounted(CountedLoss):
    """A loss whose rows do not count."""

    def __call__(self, batch: MicroBatch) -> Terms:
        terms = super().__call__(batch)
        assert terms.count is not None
        return replace(terms, count=terms.count * 0)


class Foreign(CountedLoss):
    """A column that batches do not have."""

    columns = ("pixels",)


def a_job(order: str) -> JobSpec:
    return spec(
        model={"config": TINY, "dtype": "fp32", "gradient_checkpointing": "none"},
        data={"sequence_length": 32},
        training={"per_device_train_batch_size": 2, "global_batch_size": 8} | ORDERS[order],
        scaling={"num_workers": 2},
    )


def gradient_errors(order: str) -> dict[str, float]:
    """Return the relative differences of loss and gradients from those of plain PyTorch over the whole step."""
    job = a_job(order)
    model, token_loss, mesh = build(job)
    rows = random_rows(8, 32, vocab=TINY["vocab_size"], packed=True)
    expected, gradients = reference(job, rows)
    found = accumulate(
        CountedLoss(token_loss.anatomy),
        micro_batches(my_share(rows, mesh), 2, token_loss.anatomy, mesh),
        None,
        reduction=build_reduction(model, plan_job(job, model_shape(job.model)).tree, mesh, seed=0),
        scaler=GradScaler(enabled=False),
    )
    errors = {"loss": abs(found.loss.item() / expected - 1)}
    for name, parameter in model.named_parameters():
        errors[name] = ((whole(parameter.grad) - gradients[name]).norm() / gradients[name].norm()).item()
    return errors


def train_with(folder: Path, name: str, objective: type[CountedLoss], **parts: Any) -> str:
    """Run the loop with an objective; return the error that ends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train_loop.loop.build.build_objective", lambda sharded, *_: objective(sharded.anatomy))
        try:
            run(folder / "d.parquet", folder / name, **parts)
        except UserError as error:
            return str(error)
    return ""


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """Compare gradients, and run the loop with every objective, on the same ranks."""
    run(folder / "d.parquet", folder / "known")
    for dtype in ("fp32", "fp16"):
        train_with(folder, f"counted {dtype}", CountedLoss, model={"dtype": dtype})
    wrong = (Renamed, Unstated, CountedTwice, Uncounted, Foreign)
    return {
        "errors": {order: gradient_errors(order) for order in ORDERS},
        "refused": {one.__name__: train_with(folder, one.__name__, one) for one in wrong},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=40, length=LENGTH, vocab=TINY["vocab_size"])
    return folder


@pytest.fixture(scope="module", autouse=True)
def found(folder: Path) -> dict[str, Any]:
    first, second = on_ranks(2, on_two_ranks, folder)
    assert first["refused"] == second["refused"]
    return dict(first)


@pytest.mark.parametrize("order", ORDERS)
def test_step_equals_the_sum_over_the_count_of_the_whole_step(found: dict[str, Any], order: str) -> None:
    errors = found["errors"][order]
    assert len(errors) > 10
    assert {name: error for name, error in errors.items() if error > 1e-5} == {}


def test_run_with_a_late_count_equals_the_run_with_a_known_one(folder: Path) -> None:
    known, counted = lines(folder / "known"), lines(folder / "counted fp32")
    assert len(known) == len(counted) == STEPS
    for one, other in zip(known, counted, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_fp16_scaler_lowers_its_factor_for_undivided_gradients(folder: Path) -> None:
    """The first steps may overflow, because undivided gradients are larger; none counts as not finite."""
    exact, found = lines(folder / "counted fp32"), lines(folder / "counted fp16")
    assert events(folder / "counted fp16", "step_skipped") == []
    assert found[0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-3)
    finite = [number for number, line in enumerate(found) if line["grad_norm"] is not None]
    assert len(finite) >= STEPS - 3
    for number in finite:
        assert found[number]["grad_norm"] == pytest.approx(exact[number]["grad_norm"], rel=0.05)


def test_named_sums_are_means_in_the_metrics_line(folder: Path) -> None:
    for line in lines(folder / "counted fp32"):
        assert set(line) - LINE_FIELDS == {"accuracy"}
        labels = line["tokens"] / line["step"] * (LENGTH - 1) / LENGTH
        number = line["accuracy"] * labels
        assert number == pytest.approx(round(number), abs=1e-6)
        assert 0 <= line["accuracy"] < 1


def test_reserved_fields_are_those_of_the_metrics_line(folder: Path) -> None:
    # Only models with experts have their load.
    assert set(lines(folder / "counted fp16")[-1]) == LINE_FIELDS - {"expert_load"} | {"accuracy"}


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("Renamed", "sums named grad_norm, which are fields of every metrics line"),
        ("Unstated", r"returned the sums ('accuracy',); expected ()"),
        ("CountedTwice", "must count in exactly one place"),
        ("Uncounted", "and its count 0, by which it cannot be divided; return a count above 0"),
        ("Foreign", "needs the columns pixels; batches have"),
    ],
)
def test_objective_that_breaks_the_rule_is_refused(found: dict[str, Any], objective: str, message: str) -> None:
    assert message in found["refused"][objective]
