"""The reduction tree gives the same sum, in the same order, on every mesh that it allows."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders.specs import spec
from train_loop.data.order import Order, StepOrder
from train_loop.plan import MeshPlan, ReductionTree, allowed_workers, plan_job, plan_sizes, read_shape
from train_loop.spec import JobSpec, SpecError

Expression = str | tuple["Expression", "Expression"]
POWERS = st.sampled_from([1, 2, 4, 8])


def add(one: Expression, other: Expression) -> Expression:
    """Return a sum as an expression: equal expressions have equal bits. Addition of two numbers commutes."""
    return (one, other) if str(one) <= str(other) else (other, one)


def sum_pairs(parts: list[Expression]) -> Expression:
    while len(parts) > 1:
        parts = [add(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def summed(tree: ReductionTree, mesh: MeshPlan) -> Expression:
    """Return the sum of a step as the ranks of a mesh compute it, from the micro-batches that the order deals them."""
    order = Order(10_000, 0, shuffle=False, dataset="x", end=10_000)
    dealt = StepOrder(order, mesh.dp, tree.leaves // mesh.dp, micro_batch=1, replicas=mesh.ddp).step(0)
    shards = mesh.fsdp
    replicas = []
    for replica in range(mesh.ddp):
        stack: list[Expression] = []
        found: Expression = ""
        for turn, merges in enumerate(tree.merges(mesh)):
            ranks = dealt[replica * shards : (replica + 1) * shards, turn]
            found = sum_pairs([f"{leaf:04}" for leaf in ranks])
            for _ in range(merges):
                found = add(found, stack.pop())
            stack.append(found)
        assert stack == [found], "the last micro-batch completes every partial sum"
        replicas.append(found)
    return sum_pairs(replicas)


@given(shards=POWERS, replicas=POWERS, turns=st.integers(1, 5))
def test_every_mesh_sums_in_the_same_order(shards: int, replicas: int, turns: int) -> None:
    tree = ReductionTree(shards, replicas, shards * turns * replicas)
    sizes = [1, 2, 4, 8, 16]
    meshes = [MeshPlan(ddp, fsdp, 1) for ddp, fsdp in product(sizes, sizes) if tree.holds(MeshPlan(ddp, fsdp, 1))]
    assert len(meshes) == shards.bit_length() * replicas.bit_length()
    assert len({summed(tree, mesh) for mesh in meshes}) == 1


@given(shards=POWERS, replicas=POWERS, turns=st.integers(1, 5), fsdp=POWERS, ddp=POWERS)
def test_partial_sums_are_counted(shards: int, replicas: int, turns: int, fsdp: int, ddp: int) -> None:
    tree, mesh = ReductionTree(shards, replicas, shards * turns * replicas), MeshPlan(ddp, fsdp, 1)
    if not tree.holds(mesh):
        return
    kept, most = 0, 0
    for merges in tree.merges(mesh)[:-1]:
        kept += 1 - merges
        most = max(most, kept)
    assert tree.partial_sums(mesh) == most


def test_the_order_deals_micro_batches_to_shards_in_turn() -> None:
    order = Order(100, 0, shuffle=False, dataset="x", end=100)
    deal = StepOrder(order, 4, 4, micro_batch=2, replicas=2)
    assert deal.step(0).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert deal.rank_steps(16, 2, 1).tolist() == (deal.step(16)[1:2].tolist() + deal.step(32)[1:2].tolist())
    assert np.array_equal(np.sort(deal.step(16), axis=None), np.arange(16, 32))


def job(workers: int | dict[str, int], *, strategy: dict[str, object] | None = None, **training: object) -> JobSpec:
    return spec(
        training={"global_batch_size": 24, "reproducible": "any_size"} | training,
        strategy=strategy or {},
        scaling={"num_workers": workers},
    )


SHAPE = read_shape(
    {"model_type": "qwen3", "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
)


def test_an_elastic_job_runs_at_the_sizes_of_its_tree_only() -> None:
    elastic = job({"min": 1, "max": 6})
    assert sorted(plan_sizes(elastic, SHAPE)) == [1, 2, 4]
    plan = plan_sizes(elastic, SHAPE)[2]
    assert plan.tree == ReductionTree(4, 1, 24)
    assert allowed_workers(elastic, plan.tree) == [1, 2, 4]


def test_shard_groups_of_a_fixed_size_become_replicas() -> None:
    elastic = job({"min": 1, "max": 8}, strategy={"fsdp_size": 2}, global_batch_size=16)
    plans = plan_sizes(elastic, SHAPE)
    assert {workers: (plan.mesh.ddp, plan.mesh.fsdp) for workers, plan in plans.items()} == {
        1: (1, 1),
        2: (1, 2),
        4: (2, 2),
        8: (4, 2),
    }
    assert {plan.tree for plan in plans.values()} == {ReductionTree(2, 4, 16)}


def test_unsharded_workers_are_replicas() -> None:
    plans = plan_sizes(job({"min": 1, "max": 8}, strategy={"sharding_strategy": "NO_SHARD"}), SHAPE)
    assert sorted(plans) == [1, 2, 4, 8]
    assert {plan.tree for plan in plans.values()} == {ReductionTree(1, 8, 24)}


def test_ulysses_peers_count_once() -> None:
    plans = plan_sizes(job({"min": 1, "max": 8}, strategy={"ulysses_size": 2}), SHAPE)
    assert sorted(plans) == [2, 4, 8]
    assert {plan.tree for plan in plans.values()} == {ReductionTree(4, 1, 24)}


@pytest.mark.parametrize(
    ("workers", "tree", "pointer", "message"),
    [
        (
            6,
            {"max_shards": 4, "max_replicas": 1},
            "/scaling/num_workers",
            "num_workers=6 makes 1 replica of 6 shards, which the reduction tree of 1 replica and 4 shards does not "
            "allow; choose 1, 2 or 4",
        ),
        (
            2,
            {"max_shards": 4, "max_replicas": 4},
            "/training/global_batch_size",
            "global_batch_size=24 is not a multiple of per_device_train_batch_size=1 x 4 shards x 4 replicas of the "
            "reduction tree; choose 16 or 32, or a smaller reduction_tree",
        ),
    ],
)
def test_size_or_batch_that_does_not_fit_the_tree(
    workers: int, tree: dict[str, int], pointer: str, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        plan_job(job(workers, reduction_tree=tree), SHAPE)
    assert [(one.pointer, one.message) for one in caught.value.problems] == [(pointer, message)]


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"training": {"optimizer": "adafactor"}}, "optimizer=adafactor gives other bits on other shards"),
        ({"training": {"optimizer": "adamw_8bit"}}, "optimizer=adamw_8bit gives other bits on other shards"),
        ({"training": {"global_batch_size": None}}, "add global_batch_size"),
        (
            {"training": {"reproducible": "same_size", "reduction_tree": {"max_shards": 2}}},
            "reduction_tree has no effect",
        ),
        ({"training": {"reduction_tree": {"max_shards": 3}}}, "3 is not a power of two; choose 2 or 4"),
        ({"model": {"dtype": "fp16"}}, "model.dtype=fp16 is not proven"),
        ({"model": {"dtype": "bf16", "master_dtype": "bf16"}}, "model.master_dtype=bf16 is not proven"),
        ({"strategy": {"reduce_dtype": "bf16"}}, "reduce_dtype=bf16 is not proven"),
        (
            {"strategy": {"ulysses_size": 2, "sharding_strategy": "NO_SHARD"}, "scaling": {"num_workers": 2}},
            "ulysses_size=2 with sharding_strategy=NO_SHARD is not proven",
        ),
    ],
)
def test_what_is_not_proven_is_refused(parts: dict[str, dict[str, object]], problem: str) -> None:
    given = {"training": {"global_batch_size": 8, "reproducible": "any_size"}}
    with pytest.raises(SpecError, match=problem):
        spec(**{name: given.get(name, {}) | parts.get(name, {}) for name in given | parts})


def test_a_chosen_size_keeps_the_tree_of_the_range() -> None:
    elastic = job({"min": 1, "max": 8}, strategy={"fsdp_size": 2})
    assert elastic.at(1).reduction_tree == elastic.reduction_tree
    assert elastic.at(1).at_any_size() == elastic.at(8).at_any_size()
    assert job(2).at_any_size() != job(4).at_any_size(), "runs of different trees have different bits"
