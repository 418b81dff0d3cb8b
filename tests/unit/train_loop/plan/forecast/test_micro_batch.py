"""Choice of a run's micro-batch by the memory of its workers."""

from typing import Any

import pytest

from tests.support.builders.specs import TINY, spec
from train_loop.plan import MicroBatch, RankMemory, choose_micro_batch, estimated_need, plan_job, read_shape, sized
from train_loop.plan.forecast.fit import CONTEXT_BYTES
from train_loop.spec import JobSpec, SpecError

SHAPE = read_shape(TINY)
HOST, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}


def job(resources: dict[str, float] = HOST, **training: Any) -> JobSpec:
    return spec(
        model={"config": TINY},
        training={"per_device_train_batch_size": "auto", "global_batch_size": 24} | training,
        scaling={"num_workers": 2, "resources_per_worker": resources},
    )


def room_for(size: int, resources: dict[str, float]) -> RankMemory:
    """Return the memory that micro-batches of a size just fit."""
    chosen = sized(job(resources), size)
    plan = plan_job(chosen, SHAPE)
    if resources is GPU:
        return RankMemory("H100", int(1.1 * plan.memory_bytes) + CONTEXT_BYTES + 1, on_gpu=True)
    return RankMemory("cpu", int(1.1 * estimated_need(chosen, plan).host_bytes) + 1, on_gpu=False)


@pytest.mark.parametrize("resources", [HOST, GPU])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_largest_divisor_that_fits_by_the_plan_is_chosen(resources: dict[str, float], size: int) -> None:
    memory = room_for(size, resources)
    found = choose_micro_batch(job(resources), SHAPE, memory, before=None)
    assert found == MicroBatch(size, memory.device, 2, "plan")
    plan = plan_job(sized(job(resources), size), SHAPE)
    assert (plan.batch.global_batch, plan.batch.accumulation) == (24, 12 // size)


def test_one_is_chosen_if_nothing_fits() -> None:
    assert choose_micro_batch(job(), SHAPE, RankMemory("cpu", 1, on_gpu=False), before=None).size == 1


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (MicroBatch(3, "cpu", 2), (3, "kept")),
        (MicroBatch(3, "cpu", 2, "out_of_memory"), (3, "kept")),
        (MicroBatch(3, "H100", 2), (6, "plan")),
        (MicroBatch(3, "cpu", 4), (6, "plan")),
        (MicroBatch(5, "cpu", 2), (6, "plan")),
    ],
)
def test_choice_is_kept_on_the_same_device_and_number_of_workers(before: MicroBatch, expected: tuple[int, str]) -> None:
    found = choose_micro_batch(job(), SHAPE, room_for(6, HOST), before=before)
    assert (found.size, found.because) == expected


@pytest.mark.parametrize(("failed", "size"), [({12}, 6), ({12, 6}, 4), ({4}, 3), ({2}, 1), ({1}, 1)])
def test_next_smaller_divisor_follows_one_that_ran_out_of_memory(failed: set[int], size: int) -> None:
    found = choose_micro_batch(job(), SHAPE, room_for(12, HOST), before=MicroBatch(12, "cpu", 2), failed=failed)
    assert (found.size, found.because) == (size, "out_of_memory")


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"global_batch_size": None}, r"=auto needs the sequences of a step.*; add global_batch_size"),
        ({"reproducible": "any_size"}, r"=auto depends on the memory of the workers, .*; write a number"),
        (
            {"per_device_train_batch_size": "automatic"},
            r"invalid per_device_train_batch_size=automatic; expected a num",
        ),
        ({"per_device_train_batch_size": True}, "invalid per_device_train_batch_size=True; expected a number of"),
        ({"per_device_train_batch_size": 0}, "greater than or equal to 1"),
    ],
)
def test_auto_needs_a_global_batch_and_no_bits_of_any_size(training: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        job(**training)
    assert job(per_device_train_batch_size="4").training.micro_batch == 4
