"""Which ranks share a node, and why some find no place."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_loop.plan import lay_out, no_place
from train_loop.spec import ScalingSpec

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
    ("asked", "nodes", "message"),
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
def test_why_there_is_no_place(asked: ScalingSpec, nodes: list[dict[str, float]], message: str) -> None:
    assert lay_out(asked, nodes) is None
    assert no_place(asked, nodes) == message


def test_nodes_that_are_not_known_hold_nobody_up() -> None:
    assert no_place(scaling(100), []) is None


@given(
    st.integers(1, 12),
    st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
)
def test_no_node_gets_more_than_it_has_and_nobody_is_left_out(workers: int, strategy: str, gpus: list[int]) -> None:
    found = lay_out(scaling(workers, strategy, GPU=1.0), [{"GPU": float(count)} for count in gpus])
    if found is None:
        assert strategy.startswith("STRICT") or sum(gpus) < workers
        return
    assert [rank for ranks in found.values() for rank in ranks] == list(range(workers))
    assert all(len(ranks) <= gpus[node] for node, ranks in found.items())
