"""A plan compared with the memory of nodes and devices: what is refused, and the remedy that is named."""

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.support.builders.searches import seeds
from tests.support.builders.specs import TINY, raw_spec
from train_loop.plan import (
    ModelShape,
    NodeRoom,
    ParameterCounts,
    Plan,
    certain_needs,
    cheapest_change,
    estimated_need,
    fits,
    lay_out,
    memory_problem,
    plan_sizes,
    plans_that_fit,
    read_shape,
    unknown_memory,
)
from train_loop.spec import JobSpec, SpecError, override, parse

GIB = 1 << 30
SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "0.6B": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "7B": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "72B": {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80},
}


def a_case(rng: random.Random) -> tuple[JobSpec, ModelShape, tuple[NodeRoom, ...]]:
    """Return a random valid spec with the sizes of its model, and a random cluster."""
    gpu = rng.random() < 0.5
    config = TINY | SIZES[rng.choice([*SIZES])]
    world = rng.choice([1, 1, 2, 4, 8])
    workers: Any = {"min": 1, "max": world} if rng.random() < 0.2 else world
    parts: dict[str, Any] = {
        "model": {"config": config, "master_dtype": rng.choice(["fp32", "fp32", "bf16"]), "dtype": "bf16"},
        "training": {
            "optimizer": rng.choice(["adamw", "adamw", "adamw_8bit", "sgd", "muon", "adafactor"]),
            "ema_decay": rng.choice([None, 0.99]),
            "global_batch_size": 64,
            "reproducible": rng.choice(["same_size", "same_size", "any_size"]),
        },
        "strategy": {
            "fsdp_size": rng.choice([0, 2]),
            "offload_policy": rng.random() < 0.3,
            "async_save_ckpt": rng.choice([True, False]),
            "sharding_strategy": rng.choice(["FULL_SHARD", "FULL_SHARD", "NO_SHARD"]),
        },
        "scaling": {
            "num_workers": workers,
            "resources_per_worker": {"CPU": 1.0, "GPU": 1.0} if gpu else {"CPU": 1.0},
            "placement_strategy": rng.choice(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
        },
    }
    nodes = tuple(
        NodeRoom(
            {"CPU": float(rng.choice([2, 4, 16])), "GPU": float(gpus)},
            rng.choice([None, GIB, 8 * GIB, 23 * GIB, 256 * GIB, 2048 * GIB]),
            rng.choice([None, tuple(rng.choice([16, 80, 141]) * GIB for _ in range(gpus))]),
        )
        for gpus in (rng.choice([0, 1, 8]) for _ in range(rng.choice([1, 1, 2, 4])))
    )
    try:
        return parse(raw_spec(**parts)), read_shape(config), nodes
    except SpecError:
        return a_case(rng)


def planned(spec: JobSpec, shape: ModelShape) -> dict[int, Plan]:
    try:
        return plan_sizes(spec, shape)
    except SpecError:
        return {}


def holds(spec: JobSpec, plan: Plan, nodes: tuple[NodeRoom, ...]) -> bool:
    """Return whether a layout within the memory exists, by trying how many workers each node gets."""
    needs, each = certain_needs(spec, plan), spec.scaling.resources_per_worker
    if lay_out(spec.scaling, [node.resources for node in nodes]) is None:
        spec = spec.at(1)
    rooms = []
    for node in nodes:
        counts = [int(node.resources[name] // amount) for name, amount in each.items() if amount]
        for need in needs:
            if node.host is not None:
                counts.append(node.host // need.host_bytes)
            if node.devices and need.device_bytes:
                counts.append(sum(device >= need.device_bytes for device in node.devices))
        rooms.append(min(counts))
    return {
        "STRICT_PACK": max(rooms) >= spec.scaling.world,
        "STRICT_SPREAD": sum(room > 0 for room in rooms) >= spec.scaling.world,
    }.get(spec.scaling.placement_strategy, sum(rooms) >= spec.scaling.world)


def test_jobs_are_refused_only_if_their_terms_exceed_every_layout() -> None:
    refused = remedied = 0
    for seed in range(seeds(200, more=2_000)):
        spec, shape, nodes = a_case(random.Random(seed))
        plans = planned(spec, shape)
        if not plans or not any(lay_out(spec.scaling.at(1), [node.resources]) for node in nodes):
            continue
        expected = {workers for workers, plan in plans.items() if holds(spec.at(workers), plan, nodes)}
        assert plans_that_fit(spec, plans, nodes).keys() == expected, seed
        problem = memory_problem(spec, plans, shape, nodes)
        assert (problem is None) is bool(expected), seed
        if problem is None:
            continue
        refused += 1
        assert (problem.pointer, "the model does not fit: " in problem.message) == ("/model/config", True), seed
        change = cheapest_change(spec, shape, nodes)
        if change is None:
            assert "no setting makes it fit" in problem.message, seed
            continue
        remedied += 1
        assert f"cheapest change that fits: {change}, with " in problem.message, seed
        changed = override(spec, change.patch)
        assert memory_problem(changed, plan_sizes(changed, shape), shape, nodes) is None, seed
    assert min(refused, remedied) > seeds(200, more=2_000) // 40, "expected refused and remedied cases"


def test_estimate_grows_with_the_parameters_and_shrinks_with_the_shards() -> None:
    for seed in range(seeds(100)):
        spec, shape, _ = a_case(random.Random(seed))
        larger = replace(shape, layers=shape.layers + 1)
        more = spec.at(2 * spec.scaling.bounds[1])
        plans, grown, sharded = planned(spec, shape), planned(spec, larger), planned(more, shape)
        for workers, plan in plans.items():
            for need, other in zip(certain_needs(spec, plan), certain_needs(spec, grown[workers]), strict=True):
                assert other.host_bytes + other.device_bytes > need.host_bytes + need.device_bytes, seed
        if spec.strategy.sharding_strategy == "FULL_SHARD" and spec.strategy.fsdp_size == 0:
            states = ("parameters", "gradients", "optimizer")
            for fewest, most in zip([plans[max(plans)]] if plans else [], sharded.values(), strict=False):
                before, after = ({t.name: t.bytes for t in p.memory if t.name in states} for p in (fewest, most))
                assert all(after[name] <= before[name] for name in states), seed


def a_large_spec(**parts: dict[str, Any]) -> tuple[JobSpec, ModelShape]:
    spec = parse(raw_spec(**{"model": {"config": TINY | SIZES["72B"]}, **parts}))
    return spec, read_shape(TINY | SIZES["72B"])


def test_model_of_72_billion_parameters_is_refused_with_terms_and_a_remedy() -> None:
    spec, shape = a_large_spec()
    plans = plan_sizes(spec, shape)
    laptop = (NodeRoom({"CPU": 2.0}, 20 * GIB),)
    problem = memory_problem(spec, plans, shape, laptop)
    assert problem is not None
    assert problem.message.startswith("the model does not fit: in a step, the worker needs ")
    assert "optimizer " in problem.message
    assert "and the node has 20.0 GiB for workers; no setting makes it fit on these nodes" in problem.message
    large = (NodeRoom({"CPU": 64.0}, 4096 * GIB),)
    assert memory_problem(spec, plans, shape, large) is None
    unstaged = sum(term.bytes for term in plans[1].memory if term.name != "checkpoint_staging")
    between = (NodeRoom({"CPU": 64.0}, unstaged + GIB),)
    change = cheapest_change(spec, shape, between)
    assert str(change) == "strategy.async_save_ckpt: false"


def test_frozen_parameters_need_neither_gradients_nor_optimizer_state() -> None:
    spec, shape = a_large_spec()
    total = shape.parameters
    counts = ParameterCounts(total, total // 100, 0, shape.layer_parameters, shape.embedding_parameters, 1 << 20)
    terms = {t.name: t.bytes for t in plan_sizes(spec, replace(shape, counts=counts))[1].memory}
    assert terms["parameters"] == 4 * total
    assert (terms["gradients"], terms["optimizer"]) == (4 * (total // 100), 8 * (total // 100))


def test_each_rank_draws_the_largest_module_on_its_host() -> None:
    gpus = {"num_workers": 8, "resources_per_worker": {"CPU": 1.0, "GPU": 1.0}}
    spec, shape = a_large_spec(scaling=gpus, training={"global_batch_size": 8})
    step, _, weights = certain_needs(spec, plan_sizes(spec, shape)[8])
    drawn = next(term for term in weights.host if term.name == "random_module")
    assert drawn.bytes == 4 * 152064 * 8192 < weights.host_bytes < step.host_bytes
    assert "random_module" not in {term.name for term in step.host}


def test_unknown_memory_is_reported_and_not_refused() -> None:
    spec, shape = a_large_spec()
    (plan,) = plan_sizes(spec, shape).values()
    need = certain_needs(spec, plan)[0]
    for nodes in ((), (NodeRoom({"CPU": 8.0}),), (NodeRoom({"CPU": 8.0}, GIB), NodeRoom({"CPU": 8.0}))):
        assert fits(spec, need, nodes)
        assert unknown_memory(spec, need, nodes)
    assert not unknown_memory(spec, need, (NodeRoom({"CPU": 8.0}, 9999 * GIB), NodeRoom({"CPU": 8.0})))


@pytest.mark.parametrize(("free", "fit"), [((8.0, 0.0), False), ((8.0, 8.0), True)])
def test_only_nodes_that_can_run_a_worker_count(free: tuple[float, float], fit: bool) -> None:
    spec, shape = a_large_spec()
    (plan,) = plan_sizes(spec, shape).values()
    nodes = (NodeRoom({"CPU": free[0]}, GIB), NodeRoom({"CPU": free[1]}, 9999 * GIB))
    assert fits(spec, certain_needs(spec, plan)[0], nodes) is fit


def test_host_memory_of_a_rank_with_a_gpu_is_near_a_measured_one() -> None:
    """Peaks of Qwen3-0.6B on an H200, from `benchmarks/results/2026-11-26-gpu-*.json`, with and without saves."""
    config = TINY | SIZES["0.6B"] | {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8}
    config |= {"tie_word_embeddings": True}
    gpu = {"num_workers": 1, "resources_per_worker": {"CPU": 1.0, "GPU": 1.0}}
    spec, shape = parse(raw_spec(model={"config": config, "dtype": "bf16"}, scaling=gpu)), read_shape(config)
    (plan,) = plan_sizes(spec, shape).values()
    need = estimated_need(spec, plan)
    saves = sum(term.bytes for term in need.host if term.name == "checkpoint_staging")
    cuda = sum(term.bytes for term in need.host if term.name == "cuda")
    assert need.host_bytes == pytest.approx(10_021_810_176, rel=0.1)
    drawn = 4 * shape.largest_module
    assert need.host_bytes - saves - saves // 4 + drawn == pytest.approx(2_225_516_544, rel=0.1)
    assert cuda - saves // 4 == 1120 << 20
    assert certain_needs(spec, plan)[0].host_bytes == need.host_bytes - cuda
