"""Verdicts and suggestions: does a plan fit a GPU, and which changes make it fit."""

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.support.builders.searches import seeds
from tests.support.builders.specs import TINY, raw_spec
from train_loop.plan import Device, Plan, device_named, divisors, fit_on, plan_job, read_shape, suggest
from train_loop.plan.forecast.fit import CONTEXT_BYTES
from train_loop.plan.forecast.suggest import largest_micro_batch
from train_loop.spec import JobSpec, override, parse

GIB = 1 << 30
LARGE = TINY | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def planned(**parts: dict[str, Any]) -> tuple[JobSpec, Plan]:
    parts["model"] = {"config": LARGE, "dtype": "bf16"} | parts.get("model", {})
    parts["scaling"] = {"resources_per_worker": {"CPU": 1.0, "GPU": 1.0}} | parts.get("scaling", {})
    job = parse(raw_spec(**parts))
    return job, plan_job(job, read_shape(LARGE))


def of_size(memory: int) -> Device:
    return replace(device_named("h200"), memory=memory)


@pytest.mark.parametrize(("more", "verdict"), [(1.2, "fits"), (1.03, "tight"), (0.5, "does_not_fit")])
def test_verdict_compares_estimate_and_certain_terms(more: float, verdict: str) -> None:
    job, plan = planned(data={"sequence_length": 4096}, model={"gradient_checkpointing": "none"})
    found = fit_on(job, plan, of_size(int(more * plan.memory_bytes) + CONTEXT_BYTES))
    assert found.verdict == verdict
    assert found.needed == plan.memory_bytes + CONTEXT_BYTES


def test_plan_that_fits_needs_no_change() -> None:
    job, plan = planned()
    assert suggest(job, plan.shape, of_size(1024 * GIB)) == []


def test_plan_that_cannot_fit_has_no_suggestion() -> None:
    job, plan = planned()
    assert suggest(job, plan.shape, of_size(2 * GIB)) == []


def test_suggestions_fit_keep_the_batch_and_contain_none_of_each_other() -> None:
    some, tried = 0, seeds(12)
    for seed in range(tried):
        rng = random.Random(seed)
        job, plan = planned(
            data={"sequence_length": rng.choice([2048, 8192])},
            training={"per_device_train_batch_size": rng.choice([1, 4]), "gradient_accumulation_steps": 2},
            strategy={"sharding_strategy": rng.choice(["FULL_SHARD", "NO_SHARD"])},
            model={"gradient_checkpointing": rng.choice(["none", "full"])},
            scaling={"num_workers": rng.choice([1, 4]), "resources_per_worker": {"CPU": 8.0, "GPU": 1.0}},
        )
        device = of_size(int(rng.uniform(0.4, 1.0) * plan.memory_bytes))
        found = suggest(job, plan.shape, device)
        some += bool(found)
        for one in found:
            changed = override(job, one.patch)
            again = plan_job(changed, plan.shape)
            assert fit_on(changed, again, device).verdict == "fits", seed
            assert again.batch.global_batch == plan.batch.global_batch, (seed, str(one))
            assert one.workers == again.mesh.world
        kinds = [(one.changes_results, one.workers) for one in found]
        assert kinds == sorted(kinds), "results and hardware are kept first"
    assert some > tried // 2


def test_largest_micro_batch_fits_and_the_next_one_does_not() -> None:
    job, plan = planned(
        data={"sequence_length": 4096},
        training={"global_batch_size": 48},
        scaling={"num_workers": 2, "resources_per_worker": {"CPU": 8.0, "GPU": 1.0}},
    )
    device = of_size(100 * GIB)
    size = largest_micro_batch(job, plan.shape, device)
    assert size in divisors(24)[1:-1]
    verdicts = [
        fit_on(changed, plan_job(changed, plan.shape), device).verdict
        for one in divisors(24)
        for changed in [override(job, {"training": {"per_device_train_batch_size": one}})]
    ]
    fits = [one for one, verdict in zip(divisors(24), verdicts, strict=True) if verdict == "fits"]
    assert fits[-1] == size
    assert largest_micro_batch(job, plan.shape, of_size(8 * GIB)) is None


def test_cheapest_suggestion_costs_the_least_throughput() -> None:
    job, plan = planned(
        data={"sequence_length": 4096},
        training={"per_device_train_batch_size": 8},
        model={"gradient_checkpointing": "none"},
        scaling={"num_workers": 4, "resources_per_worker": {"CPU": 8.0, "GPU": 1.0}},
    )
    found = suggest(job, plan.shape, of_size(110 * GIB))
    assert [str(one) for one in found[:1]] == [
        "training.per_device_train_batch_size: 2 and training.global_batch_size: 32"
    ]
    assert "model.gradient_checkpointing: selective" in map(str, found), "full is slower, and not needed"
    speeds = [
        one.throughput.typical for one in found if one.throughput and not one.changes_results and one.workers == 4
    ]
    assert speeds == sorted(speeds, reverse=True)
