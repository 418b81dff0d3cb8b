"""The node of each rank when a worker group starts."""

from collections.abc import Collection
from typing import Any

import pytest
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from train_loop.plan import AUTOSCALED_VARIABLE
from train_loop.ray_train import placement
from train_loop.ray_train.placement import Nodes, Placement
from train_loop.spec import ScalingSpec

TWO_HOSTS: Nodes = {"a": {"CPU": 2.0}, "b": {"CPU": 3.0}}


class Cluster(Placement):
    """A placement on nodes whose free resources the test sets for each query."""

    def __init__(
        self, *free: Nodes, strategy: Any = "PACK", group: int = 2, whole: int = 1, autoscaled: bool = False
    ) -> None:
        scaling = ScalingSpec(num_workers=4, placement_strategy=strategy)
        super().__init__(scaling, group=group, whole=whole, autoscaled=autoscaled, timeout=10.0)
        self.scaling, self.free, self.reported = scaling, [*free], list[str]()
        self.dead = set[str]()

    def waiting(self, missing: str, unreachable: Collection[str]) -> None:
        self.reported.append(missing)

    def unreachable(self, nodes: Collection[str]) -> set[str]:
        return self.dead & set(nodes)

    def _usable_nodes(self) -> tuple[Nodes, Nodes]:
        return TWO_HOSTS, self.free.pop(0) if len(self.free) > 1 else self.free[0]


@pytest.fixture(autouse=True)
def one_second_per_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_ticks", lambda: iter(range(1000)))


def test_choose_gives_a_ulysses_group_one_node() -> None:
    cluster = Cluster(TWO_HOSTS)
    assert cluster.choose(cluster.scaling) == ["a", "a", "b", "b"]


def test_choose_gives_a_shard_group_one_node() -> None:
    assert (cluster := Cluster(TWO_HOSTS, group=1)).choose(cluster.scaling) == ["b", "b", "b", "a"]
    assert (cluster := Cluster(TWO_HOSTS, group=1, whole=2)).choose(cluster.scaling) == ["a", "a", "b", "b"]
    later = Cluster({"a": {"CPU": 1.0}, "b": {"CPU": 3.0}}, TWO_HOSTS, group=1, whole=2)
    assert later.choose(later.scaling) == ["a", "a", "b", "b"]


def test_choose_waits_for_resources_of_the_last_group() -> None:
    cluster = Cluster({"a": {"CPU": 1.0}, "b": {"CPU": 3.0}}, TWO_HOSTS)
    assert cluster.choose(cluster.scaling) == ["a", "a", "b", "b"]


def test_choose_splits_a_group_if_other_jobs_keep_the_room() -> None:
    cluster = Cluster({"a": {"CPU": 1.0}, "b": {"CPU": 3.0}})
    assert cluster.choose(cluster.scaling) == ["b", "b", "b", "a"]


def test_choose_without_room_reports_what_is_missing_and_gives_up() -> None:
    cluster = Cluster({"a": {"CPU": 1.0}, "b": {"CPU": 2.0}})
    with pytest.raises(WorkerGroupStartupTimeoutError):
        cluster.choose(cluster.scaling)
    assert set(cluster.reported) == {"4 workers with 1 CPU each; the nodes have room for 3"}


def test_choose_leaves_out_dead_nodes_that_ray_still_lists() -> None:
    cluster = Cluster({"a": {"CPU": 4.0}, "b": {"CPU": 4.0}})
    cluster.dead = {"a"}
    assert cluster.choose(cluster.scaling) == 4 * ["b"]
    cluster = Cluster({name: {"CPU": 4.0} for name in "abcd"})
    cluster.dead = {"a", "b"}
    assert cluster.choose(cluster.scaling) == 4 * ["c"]
    cluster = Cluster(TWO_HOSTS)
    cluster.dead = {"b"}
    with pytest.raises(WorkerGroupStartupTimeoutError):
        cluster.choose(cluster.scaling)
    assert set(cluster.reported) == {"4 workers with 1 CPU each; the nodes have room for 2"}


def test_choose_without_room_on_a_growing_cluster_leaves_it_to_ray() -> None:
    cluster = Cluster({"a": {"CPU": 1.0}}, autoscaled=True)
    assert cluster.choose(cluster.scaling) is None


@pytest.mark.parametrize(("setting", "grows", "expected"), [({}, False, False), ({}, True, True), ("1", False, True)])
def test_autoscaled_follows_the_operator_and_ray(
    setting: Any, grows: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train_loop.ray_train.raylet.grows", lambda: grows)
    assert placement.autoscaled({AUTOSCALED_VARIABLE: setting} if setting else {}) is expected
