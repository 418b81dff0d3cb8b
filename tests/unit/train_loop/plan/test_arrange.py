"""Workers per node, compared with every possible arrangement of small clusters."""

from functools import cache

from hypothesis import example, given
from hypothesis import strategies as st

from train_loop.plan.arrange import arrange, count_splits

CLUSTERS = st.lists(st.integers(0, 6), min_size=1, max_size=5)
GROUPS = st.integers(1, 4)


def fewest_splits(places: list[int], world: int, group: int) -> int:
    """Try every order of nodes and every number of workers on each."""

    @cache
    def whole(used: int, first: int) -> int:
        if first == world:
            return 0
        best = -world
        for node, count in enumerate(places):
            if not used >> node & 1:
                for last in range(first + 1, min(first + count, world) + 1):
                    here = max(0, last // group - -(-first // group))
                    best = max(best, here + whole(used | 1 << node, last))
        return best

    return world // group - whole(0, 0)


def fewest_nodes(places: list[int], wanted: int) -> int:
    """Count the largest nodes that together hold all groups."""
    largest = sorted(places, reverse=True)
    return next(n for n in range(len(places) + 1) if sum(largest[:n]) >= wanted)


@given(CLUSTERS, GROUPS, st.integers(1, 12), st.sampled_from(["PACK", "SPREAD"]))
@example([3, 3, 3, 3], 2, 5, "PACK")
@example([4, 4, 4, 5], 3, 5, "PACK")
@example([2, 5, 5], 4, 3, "SPREAD")
@example([1, 2, 1], 2, 2, "SPREAD")
def test_arrange_splits_a_group_only_if_every_arrangement_does(
    places: list[int], group: int, groups: int, strategy: str
) -> None:
    world = groups * group
    found = arrange(places, world, strategy=strategy, group=group)
    if sum(places) < world:
        assert found is None
        return
    assert found is not None
    assert sum(count for _, count in found) == world
    assert all(0 < count <= places[node] for node, count in found)
    assert len(dict(found)) == len(found)
    assert count_splits(found, group) == fewest_splits(places, world, group)
    assert found == arrange(places, world, strategy=strategy, group=group)


@given(CLUSTERS, GROUPS, st.integers(1, 12))
def test_arrange_packs_whole_groups_on_the_fewest_nodes(places: list[int], group: int, groups: int) -> None:
    units = [count // group for count in places]
    if sum(units) >= groups:
        found = arrange(places, groups * group, strategy="PACK", group=group)
        assert found is not None
        assert len(found) == fewest_nodes(units, groups)


@given(CLUSTERS, GROUPS, st.integers(1, 12))
def test_arrange_spreads_whole_groups_evenly(places: list[int], group: int, groups: int) -> None:
    units = [count // group for count in places]
    if sum(units) >= groups:
        counts = dict(arrange(places, groups * group, strategy="SPREAD", group=group) or ())
        fullest = max(counts.values())
        # No node with room would suit a group better.
        assert all(
            counts.get(node, 0) >= fullest - group
            for node, most in enumerate(units)
            if counts.get(node, 0) < most * group
        )


@given(CLUSTERS, GROUPS, st.integers(1, 12))
def test_arrange_keeps_strict_strategies(places: list[int], group: int, groups: int) -> None:
    world = groups * group
    packed = arrange(places, world, strategy="STRICT_PACK", group=group)
    smallest = min(((count, node) for node, count in enumerate(places) if count >= world), default=None)
    assert packed == (None if smallest is None else [(smallest[1], world)])
    spread = arrange(places, world, strategy="STRICT_SPREAD", group=group)
    assert (spread is None) == (sum(count > 0 for count in places) < world)
    assert all(count == 1 and places[node] for node, count in spread or ())


def test_arrange_packs_the_rest_on_the_smallest_node_that_holds_it() -> None:
    assert arrange([8, 2, 4], 10, strategy="PACK", group=1) == [(0, 8), (1, 2)]


def test_arrange_spreads_leftover_workers_one_by_one() -> None:
    assert arrange([2, 2, 2], 4, strategy="SPREAD", group=1) == [(0, 2), (1, 1), (2, 1)]
