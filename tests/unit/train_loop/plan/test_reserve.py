"""The host memory that workers reserve where a node limits them to it."""

import random
from dataclasses import replace

import pytest

from tests.support.builders.searches import seeds
from tests.support.builders.specs import TINY, raw_spec
from tests.unit.train_loop.plan.test_fit import GIB, a_case, planned
from train_loop.plan import (
    NodeRoom,
    RankMemory,
    certain_needs,
    choose_micro_batch,
    estimated_need,
    lay_out,
    plan_sizes,
    plans_that_fit,
    read_shape,
    reservations,
    task_bytes,
    task_reservation,
)
from train_loop.spec import JobSpec, parse


def test_reservation_holds_what_is_certain_and_a_job_alone_always_fits() -> None:
    compared = 0
    for seed in range(seeds(200)):
        rng = random.Random(seed)
        spec, shape, _ = a_case(rng)
        memory = rng.choice([1, 2, 8, 64, 1024]) * GIB
        node = NodeRoom({"CPU": 64.0, "GPU": 8.0}, memory, (1 << 50,) * 8, limited=True)
        plans = plans_that_fit(spec, planned(spec, shape), [node])
        assert reservations(spec, plans, None, [replace(node, limited=False)]) == {}
        for workers, each in reservations(spec, plans, None, [node]).items():
            certain = max(need.host_bytes for need in certain_needs(spec.at(workers), plans[workers]))
            assert certain <= each, seed
            assert workers * each <= memory or lay_out(spec.scaling.at(workers), [node.resources]) is None, seed
            # The whole estimate is reserved, unless a job alone would not fit with it.
            estimate = estimated_need(spec.at(workers), plans[workers]).host_bytes
            assert each >= min(estimate, int(0.97 * memory) // workers), seed
            # The job still fits if the node has a little less memory later.
            assert each == certain or workers * each <= 0.97 * memory, seed
            compared += 1
    assert compared > seeds(200) // 4


def test_memory_of_the_spec_is_reserved() -> None:
    spec = parse(raw_spec(scaling={"num_workers": 2, "resources_per_worker": {"CPU": 1.0, "memory": 3 * GIB}}))
    node = NodeRoom({"CPU": 8.0}, 64 * GIB, limited=True)
    assert reservations(spec, plan_sizes(spec, read_shape(TINY)), None, [node]) == {2: 3 * GIB}


@pytest.mark.parametrize("hidden", [64, 256])
def test_workers_that_choose_their_micro_batch_reserve_their_whole_share(hidden: int) -> None:
    def job(size: int | str) -> JobSpec:
        return parse(
            raw_spec(
                data={"sequence_length": 4096},
                training={"per_device_train_batch_size": size, "global_batch_size": 16},
                scaling={"num_workers": 2},
            )
        )

    shape, node = read_shape(TINY | {"hidden_size": hidden}), NodeRoom({"CPU": 8.0}, 64 * GIB, limited=True)
    each = {size: reservations(job(size), plan_sizes(job(size), shape), None, [node])[2] for size in (1, 8, "auto")}
    assert each[1] < each[8] == each["auto"]
    chosen = choose_micro_batch(job("auto"), shape, RankMemory("cpu", each["auto"], on_gpu=False), before=None)
    assert chosen.size == 8


def test_task_of_preparation_reserves_no_more_than_the_workers_of_its_job() -> None:
    def reserved(memory: int) -> int:
        resources = {"CPU": 1.0, "memory": memory}
        return task_reservation(parse(raw_spec(scaling={"num_workers": 2, "resources_per_worker": resources})), None)

    assert reserved(64 * GIB) == task_bytes(parse(raw_spec()), None)
    assert reserved(100 << 20) == 200 << 20


def test_two_small_jobs_fit_beside_each_other_on_a_laptop_of_8_gb() -> None:
    # 85 % of 8 GB, without the object store.
    memory = 6_300_000_000
    node = NodeRoom({"CPU": 8.0}, memory, limited=True)
    for workers, spares in ((1, True), (2, False)):
        spec = parse(raw_spec(scaling={"num_workers": workers}, failure={"spare_workers": spares}))
        each = reservations(spec, plan_sizes(spec, read_shape(TINY)), None, [node])[workers]
        assert 2 * workers * each <= memory, (workers, each)
