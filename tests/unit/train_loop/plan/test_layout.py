"""The placement of ranks on nodes, and the reasons for missing places."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders.specs import spec
from train_loop.model.folder import model_shape
from train_loop.plan import (
    allows_size,
    divisors,
    fitting_sizes,
    lay_out,
    list_ranks,
    missing_places,
    no_place,
    plan_job,
    shards_per_node,
    splits,
    why_gathers_cross,
    why_no_data_cpu,
    why_split,
)
from train_loop.spec import JobSpec, ScalingSpec, SpecError, StrategySpec, override

FOUR = {"CPU": 16.0, "GPU": 4.0}
EIGHT = {"CPU": 32.0, "GPU": 8.0}
HEAD = {"CPU": 8.0}


def scaling(workers: int, strategy: Any = "PACK", **resources: float) -> ScalingSpec:
    each = resources or {"CPU": 1.0, "GPU": 1.0}
    return ScalingSpec(num_workers=workers, placement_strategy=strategy, resources_per_worker=each)


@pytest.mark.parametrize(
    ("workers", "strategy", "nodes", "expected"),
    [
        (4, "PACK", [HEAD, EIGHT, FOUR], [(2, range(4))]),
        (6, "PACK", [FOUR, FOUR], [(0, range(4)), (1, range(4, 6))]),
        (12, "PACK", [FOUR, EIGHT], [(1, range(8)), (0, range(8, 12))]),
        (4, "SPREAD", [FOUR, FOUR, HEAD], [(0, range(2)), (1, range(2, 4))]),
        (5, "SPREAD", [FOUR, EIGHT], [(0, range(3)), (1, range(3, 5))]),
        (4, "STRICT_PACK", [FOUR, EIGHT], [(0, range(4))]),
        (2, "STRICT_SPREAD", [FOUR, EIGHT], [(0, range(1)), (1, range(1, 2))]),
    ],
)
def test_ranks_are_numbered_node_by_node(
    workers: int, strategy: str, nodes: list[dict[str, float]], expected: list[tuple[int, range]]
) -> None:
    found = lay_out(scaling(workers, strategy), nodes)
    assert found is not None
    assert list(found.items()) == expected
    assert no_place(scaling(workers, strategy), nodes) is None


@pytest.mark.parametrize(
    ("requested", "nodes", "message"),
    [
        (
            scaling(1, GPU=6.0),
            [FOUR, FOUR],
            "a worker needs 6 GPU, which no single node of the cluster has; add larger nodes, or ask for less",
        ),
        (
            scaling(2, GPU=3.0),
            [FOUR, HEAD, HEAD],
            "2 workers need 3 GPU each, and the nodes of the cluster have places for 1 such workers; add nodes, or ask "
            "for fewer or smaller workers",
        ),
        (
            scaling(6, "STRICT_PACK"),
            [FOUR, FOUR],
            "placement_strategy=STRICT_PACK asks for 6 workers on one node, and no node has room for more than 4; "
            "choose PACK, or fewer workers",
        ),
        (
            scaling(3, "STRICT_SPREAD"),
            [FOUR, FOUR, HEAD],
            "placement_strategy=STRICT_SPREAD asks for a node for each of 3 workers, and 2 nodes have room for one; "
            "choose SPREAD, or fewer workers",
        ),
    ],
)
def test_missing_places_are_explained(requested: ScalingSpec, nodes: list[dict[str, float]], message: str) -> None:
    assert lay_out(requested, nodes) is None
    assert no_place(requested, nodes) == message


def test_unknown_nodes_block_nothing() -> None:
    assert no_place(scaling(100), []) is None


@given(
    st.integers(1, 12),
    st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
)
def test_layout_places_every_rank_within_node_capacity(workers: int, strategy: str, gpus: list[int]) -> None:
    found = lay_out(scaling(workers, strategy, GPU=1.0), [{"GPU": float(count)} for count in gpus])
    if found is None:
        assert strategy.startswith("STRICT") or sum(gpus) < workers
        return
    assert [rank for ranks in found.values() for rank in ranks] == list(range(workers))
    assert all(len(ranks) <= gpus[node] for node, ranks in found.items())


def test_lay_out_keeps_a_ulysses_group_on_one_node() -> None:
    nodes = [{"CPU": 3.0}, {"CPU": 3.0}, {"CPU": 3.0}]
    found = lay_out(scaling(4, "SPREAD", CPU=1.0), nodes, group=2)
    assert found == {0: range(2), 1: range(2, 4)}
    assert why_split(scaling(4, "SPREAD", CPU=1.0), nodes, group=2) is None


def test_lay_out_leaves_ray_data_a_whole_cpu_if_any_layout_does() -> None:
    nodes = [{"CPU": 1.5}, {"CPU": 1.0}, {"CPU": 1.0}]
    assert lay_out(scaling(2, CPU=0.75), nodes) == {0: range(2)}
    assert lay_out(scaling(2, "SPREAD", CPU=0.75), nodes) == {0: range(1), 1: range(1, 2)}
    assert no_place(scaling(2, CPU=0.75), nodes[:2]) is None


@given(
    st.integers(1, 8),
    st.sampled_from(["PACK", "SPREAD"]),
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.sampled_from([0.5, 0.75, 1.0, 1.5, 2.0]),
)
def test_lay_out_starves_ray_data_only_if_every_layout_does(
    workers: int, strategy: str, halves: list[int], each: float
) -> None:
    nodes = [{"CPU": half / 2} for half in halves]
    found = lay_out(scaling(workers, strategy, CPU=each), nodes)
    if found is None:
        return
    keeps = [node["CPU"] - each * len(found.get(place, ())) >= 1.0 for place, node in enumerate(nodes)]
    room = [int(node["CPU"] / each) for node in nodes]
    possible = any(
        node["CPU"] >= 1.0 and sum(room) - room[place] + int((node["CPU"] - 1.0) / each) >= workers
        for place, node in enumerate(nodes)
    )
    assert any(keeps) == possible
    assert (why_no_data_cpu(scaling(workers, strategy, CPU=each), nodes) is None) == possible


@pytest.mark.parametrize(
    ("requested", "nodes", "message"),
    [
        (
            scaling(4, CPU=1.0),
            [{"CPU": 1.0}] * 5,
            "2 of 2 Ulysses groups cross nodes, where their all-to-all is slow: nodes with places for 1 (x 5 nodes) "
            "workers hold 0 whole groups of ulysses_size=2; choose ulysses_size=1, or add a node with places for 2 "
            "workers",
        ),
        (
            scaling(2, "STRICT_SPREAD", CPU=1.0),
            [{"CPU": 4.0}] * 2,
            "1 of 1 Ulysses groups cross nodes, where their all-to-all is slow: placement_strategy=STRICT_SPREAD puts "
            "one worker on a node; choose SPREAD or PACK",
        ),
    ],
)
def test_why_split_names_what_avoids_it(requested: ScalingSpec, nodes: list[dict[str, float]], message: str) -> None:
    assert why_split(requested, nodes, group=2) == message


def test_missing_places_counts_the_free_capacity() -> None:
    nodes = [{"CPU": 1.0}, {"CPU": 3.0}]
    missing = {strategy: missing_places(scaling(6, strategy, CPU=1.0), nodes) for strategy in ("PACK", "STRICT_PACK")}
    assert missing["PACK"] == "6 workers with 1 CPU each; the nodes have room for 4"
    assert missing["STRICT_PACK"] == "6 workers with 1 CPU each on one node; the largest room is for 3"
    spread = missing_places(scaling(6, "STRICT_SPREAD", CPU=1.0), nodes)
    assert spread == "a node each for 6 workers with 1 CPU; 2 nodes have room for one"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([0, 2, 5], "ranks 0, 2 and 5"),
        ([], "ranks"),
    ],
)
def test_list_ranks_returns_a_phrase(ranks: list[int], text: str) -> None:
    assert list_ranks(ranks) == text


def advised(reason: str) -> list[tuple[str, int]]:
    """Return the settings and sizes that a reason advises; of a number of workers, num_workers."""
    advice = reason.partition("choose ")[2].partition(", or add")[0].partition("resources_per_worker")[0]
    sizes = [(name, int(size)) for name, size in re.findall(r"([a-z_ ]*[a-z_])=(\d+)", advice)]
    return [*sizes, *(("num_workers", int(size)) for size in re.findall(r"(\d+) workers", advice))]


@st.composite
def split_jobs(draw: st.DrawFn) -> tuple[JobSpec, list[dict[str, float]]]:
    """Return a job whose mesh is planned, and nodes with places for its workers."""
    tp, sp, shards, replicas, accumulation = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(5))
    ep = tp * draw(st.sampled_from(divisors(sp * shards)))
    job = spec(
        data={"sequence_length": 144},
        strategy={"tp_size": tp, "ulysses_size": sp, "fsdp_size": sp * shards, "ep_size": ep},
        scaling={"num_workers": tp * sp * shards * replicas},
        training={"global_batch_size": shards * replicas * accumulation},
    )
    return job, [{"CPU": float(places)} for places in draw(st.lists(st.integers(1, 12), min_size=2, max_size=8))]


@given(split_jobs())
def test_each_advised_size_is_accepted_and_keeps_groups_whole(case: tuple[JobSpec, list[dict[str, float]]]) -> None:
    job, nodes = case
    strategy, allows = job.strategy, partial(allows_size, job)
    groups = ((strategy.name_of_peers, strategy.peers, 0), ("ep_size", strategy.ep_size, strategy.peers))
    for name, group, peers in groups:
        reason = why_split(job.scaling, nodes, group=group, name=name, peers=peers, allows=allows)
        for setting, size in advised(reason or ""):
            workers, each = (size, group) if setting == "num_workers" else (job.scaling.world, size)
            assert setting in ("num_workers", name)
            assert setting != "ep_size" or size % strategy.tp_size == 0
            ranks = lay_out(job.scaling.at(workers), nodes, group=peers or each)
            assert ranks is not None
            assert splits(ranks, each) == 0
            assert any(accepted(job, change) for change in changes(strategy, setting, size)), (setting, size)


def changes(strategy: StrategySpec, setting: str, size: int) -> list[dict[str, Any]]:
    """Return the changes of a spec that give a setting, or a product of settings, a size."""
    if setting == "num_workers":
        return [{"scaling": {setting: size}}]
    if " x " not in setting:
        return [{"strategy": {setting: size}}]
    pairs = ((tp, size // tp) for tp in divisors(size) if tp <= strategy.tp_size)
    return [{"strategy": {"tp_size": tp, "ulysses_size": sp}} for tp, sp in pairs]


def accepted(job: JobSpec, change: dict[str, Any]) -> bool:
    """Return whether a job is planned after a change; its model has as many heads as any mesh needs."""
    shape = replace(model_shape(job.model), heads=144, kv_heads=144)
    try:
        plan_job(override(job, change), shape)
    except SpecError:
        return False
    return True


@given(split_jobs(), st.integers(1, 48))
def test_sizes_for_another_number_of_workers_are_accepted(
    case: tuple[JobSpec, list[dict[str, float]]], workers: int
) -> None:
    job = case[0].at(workers)
    sizes = fitting_sizes(job)
    assert sizes is None or accepted(job, {"strategy": sizes})
    assert (sizes == {}) == accepted(job, {})


def strategy(**fields: Any) -> StrategySpec:
    return spec(strategy=fields, model={"config": None, "path": "file:///models/a", "dtype": "bf16"}).strategy


@pytest.mark.parametrize(
    ("workers", "nodes", "fields", "size"),
    [
        (16, [EIGHT, EIGHT], {}, 8),
        (12, [EIGHT, EIGHT], {}, 6),
        (12, [EIGHT, FOUR], {}, 4),
        (8, [EIGHT], {}, 8),
        (8, [HEAD, FOUR, FOUR, FOUR], {}, 4),
        (1, [FOUR], {}, 1),
        (16, [EIGHT, EIGHT], {"tp_size": 2}, 4),
        (12, [EIGHT, EIGHT], {"ulysses_size": 2}, 6),
        (12, [EIGHT, EIGHT], {"ulysses_size": 4}, 4),
    ],
)
def test_node_is_the_largest_group_that_nodes_hold_whole(
    workers: int, nodes: list[dict[str, float]], fields: dict[str, Any], size: int
) -> None:
    chosen = strategy(fsdp_size="node", **fields)
    assert shards_per_node(chosen, scaling(workers), nodes) == size
    ranks = lay_out(scaling(workers), nodes, group=chosen.peers, whole=size * chosen.tp_size)
    assert ranks is not None
    assert splits(ranks, size * chosen.tp_size) == 0


@pytest.mark.parametrize(
    ("workers", "nodes", "fields", "message"),
    [
        (8, [], {}, "fsdp_size=node needs the nodes of the cluster, which are not known; write the number of workers"),
        (16, [EIGHT], {}, "fsdp_size=node needs nodes with 16 workers with 1 CPU and 1 GPU each; the nodes have room "),
        (7, [FOUR, FOUR], {}, "fsdp_size=node finds no equal groups of several workers: nodes with places for 4 (x 2 "),
        (2, [{"CPU": 2.0, "GPU": 1.0}] * 2, {}, "fsdp_size=node finds no equal groups of several workers"),
        (
            12,
            [FOUR] * 3,
            {"ulysses_size": 3},
            "workers hold none of those into which 12 workers divide, in multiples of 3; choose",
        ),
    ],
)
def test_nodes_without_whole_groups_are_explained(
    workers: int, nodes: list[dict[str, float]], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        shards_per_node(strategy(fsdp_size="node", **fields), scaling(workers), nodes)


@given(
    st.integers(1, 12),
    st.sampled_from(["PACK", "SPREAD"]),
    st.lists(st.integers(0, 8), min_size=1, max_size=5),
    st.sampled_from([1, 2]),
    st.sampled_from([2, 4, 6]),
)
def test_groups_of_shards_are_whole_if_any_layout_keeps_them(
    workers: int, placement: str, gpus: list[int], group: int, whole: int
) -> None:
    nodes = [{"GPU": float(count)} for count in gpus]
    found = lay_out(scaling(workers, placement, GPU=1.0), nodes, group=group, whole=whole)
    plain = lay_out(scaling(workers, placement, GPU=1.0), nodes, group=group)
    assert (found is None) is (plain is None)
    if found is None or plain is None:
        return
    assert [rank for ranks in found.values() for rank in ranks] == list(range(workers))
    assert all(len(ranks) <= gpus[node] for node, ranks in found.items())
    possible = workers % whole == 0 and sum(count // whole for count in gpus) * whole >= workers
    if possible and whole < workers:
        assert splits(found, whole) == 0
    elif not possible:
        assert found == plain


def test_gathers_across_nodes_are_explained_with_the_size_of_a_node() -> None:
    nodes = [EIGHT, EIGHT]
    assert why_gathers_cross(strategy(), scaling(16), nodes) == (
        "1 of 1 FSDP groups of 16 workers cross nodes, where gathers of each layer are slow: workers are placed as "
        "8 + 8; fsdp_size: node (here 8) shards inside nodes, if a worker has memory for larger shards"
    )
    for fields in ({"fsdp_size": 8}, {"fsdp_size": 4}, {"sharding_strategy": "NO_SHARD"}):
        assert why_gathers_cross(strategy(**fields), scaling(16), nodes) is None
    assert why_gathers_cross(strategy(), scaling(8), nodes) is None
    alone = why_gathers_cross(strategy(), scaling(2), [{"CPU": 2.0, "GPU": 1.0}] * 2)
    assert alone is not None
    assert alone.endswith("only more workers on each node avoid it")
