"""Shrink check: can an elastic job shrink after the loss of a node?"""

from typing import Any

import pytest

from service.domain.queue.shrink import cannot_shrink
from train_loop.plan import Capacity
from train_loop.spec import ScalingSpec, StrategySpec


def scaling(cpus: float) -> ScalingSpec:
    raw: dict[str, Any] = {"num_workers": {"min": 2, "max": 4}, "resources_per_worker": {"CPU": cpus}}
    return ScalingSpec.model_validate(raw)


def cluster(*cpus: float) -> Capacity:
    return Capacity({"CPU": sum(cpus)}, tuple({"CPU": one} for one in cpus))


def test_job_that_fits_after_no_node_loss_is_reported_with_arithmetic() -> None:
    message = cannot_shrink(scaling(0.75), StrategySpec(), (2, 4), cluster(0, 2, 2))
    assert message is not None
    assert (
        "when a node is lost: its smallest size needs 2 x 0.75 CPU + 1 CPU for Ray Data > 2 CPU on the other nodes"
        in message
    )


def test_job_that_fits_after_some_node_losses_is_reported_with_the_node() -> None:
    message = cannot_shrink(scaling(1.0), StrategySpec(), (2, 4), cluster(4, 2))
    assert message is not None
    assert message.startswith("the job cannot shrink when a node with 4 CPU is lost: its smallest size needs 2 x 1 CPU")


@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [
        ({}, "a global_batch_size that other numbers of workers divide"),
        ({"tp_size": 4}, "a smaller tp_size"),
        ({"tp_size": 2, "ep_size": 4, "fsdp_size": 2}, "a smaller ep_size, tp_size or fsdp_size"),
    ],
)
def test_job_with_one_size_can_never_shrink(strategy: dict[str, Any], remedy: str) -> None:
    assert cannot_shrink(scaling(0.1), StrategySpec(**strategy), (4,), cluster(2, 2)) == (
        "the job can never shrink: 4 is the only number of workers from 2 to 4 that strategy, batch and memory allow; "
        f"widen num_workers, or choose {remedy}"
    )


def test_job_whose_range_is_one_number_can_never_shrink() -> None:
    one = ScalingSpec.model_validate({"num_workers": {"min": 4, "max": 4}})
    assert cannot_shrink(one, StrategySpec(tp_size=2), (4,), cluster(2, 2)) == (
        "the job can never shrink: 4 is the only number of workers in scaling.num_workers; choose a smaller min or a "
        "larger max"
    )


@pytest.mark.parametrize(
    ("cpus", "sizes", "known"),
    [
        (0.5, (2, 4), cluster(2, 2)),
        (0.75, (2, 4), cluster(2, 2, 2)),
        (0.75, (), cluster(2, 2)),
        (0.75, (2, 4), cluster(0, 4)),
        (0.75, (2, 4), Capacity({"CPU": 4})),
        (0.75, (2, 4), None),
    ],
)
def test_job_that_can_or_need_not_shrink_is_not_reported(
    cpus: float, sizes: tuple[int, ...], known: Capacity | None
) -> None:
    assert cannot_shrink(scaling(cpus), StrategySpec(), sizes, known) is None
