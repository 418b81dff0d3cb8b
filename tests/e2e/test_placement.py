"""Worker placement by real Ray on nodes of several sizes, compared with the plan."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupContext
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, Worker

from tests.support.ranks.own_ray import own_cluster
from tests.support.servers.worker_forks import worker_forks
from tests.support.waiting import wait_for
from train_loop.plan import lay_out, splits
from train_loop.ray_train import raylet
from train_loop.ray_train.placement import Nodes, Placement
from train_loop.ray_train.trainer import Trainer
from train_loop.spec import ScalingSpec

SIZES = (1, 2, 3, 4)
"""CPUs of the nodes; a test that needs fewer fills or avoids the others."""
TRAIN = SimpleNamespace(scaling_config=SimpleNamespace(use_tpu=False), run_config=SimpleNamespace())


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="shed-") as folder:
        for name, value in {"RAY_AUTH_MODE": "disabled", **worker_forks()}.items():
            patch.setenv(name, value)
        with own_cluster(num_cpus=0, object_store_memory=80_000_000, temp_dir=folder) as nodes:
            for cpus in SIZES:
                nodes.add_node(num_cpus=cpus, object_store_memory=80_000_000, wait=False)
            nodes.wait_for_nodes()
            ray.init(address=nodes.address, log_to_driver=False, logging_level="WARNING")
            yield


class SomeNodes(Placement):
    """A placement on the nodes with these numbers of CPUs."""

    def __init__(self, scaling: ScalingSpec, sizes: Sequence[int], *, group: int) -> None:
        super().__init__(scaling, group=group, timeout=0.0)
        self.sizes = sizes

    def avoided(self) -> list[str]:
        total, _ = raylet.usable()
        return [node for node, has in total.items() if has.get("CPU", 0) not in self.sizes]


def place(workers: int, strategy: Any, sizes: Sequence[int], group: int) -> list[int]:
    """Return the CPUs of each rank's node, by the calls with which Ray Train starts a worker group."""
    scaling = ScalingSpec(num_workers=workers, placement_strategy=strategy)
    context = WorkerGroupContext("", None, workers, {"CPU": 1}, strategy)
    SomeNodes(scaling, sizes, group=group).before_worker_group_start(context)
    handle = WorkerGroup._create_placement_group(TRAIN, TRAIN.scaling_config, context)
    try:
        assert handle.wait(60)
        found = ray.util.placement_group_table(handle.placement_group)["bundles_to_node_id"]
        placed = [Worker(None, metadata(found[bundle]), {"CPU": 1}) for bundle in range(workers)]
        ranked = WorkerGroup._assign_worker_ranks(placed)
        total, _ = raylet.usable()
        return [int(total[worker.metadata.node_id]["CPU"]) for worker in ranked]
    finally:
        handle.shutdown()
        # Ray takes a moment to release the resources.
        wait_for(lambda: all_free(*raylet.usable()))


def all_free(total: Nodes, free: Nodes) -> bool:
    """Return True if no worker holds a CPU."""
    return all(free[node].get("CPU") == has.get("CPU") for node, has in total.items())


def metadata(node: str) -> ActorMetadata:
    """Return a worker's metadata for Ray Train; all raylets of a test share one address, unlike hosts."""
    return ActorMetadata(hostname=node, node_id=node, node_ip=node, pid=0, accelerator_ids={})


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_ray_places_ranks_as_planned(strategy: Any, group: int) -> None:
    for sizes in ((2, 3), (1, 2, 3), (2, 3, 4), (1, 2, 3, 4), (1, 3), (4,)):
        for workers in (2, 4, 6):
            scaling = ScalingSpec(num_workers=workers, placement_strategy=strategy)
            nodes = [{"CPU": float(cpus)} for cpus in sizes]
            planned = lay_out(scaling, nodes, group=group)
            if planned is None:
                with pytest.raises(WorkerGroupStartupTimeoutError):
                    place(workers, strategy, sizes, group)
                continue
            found = place(workers, strategy, sizes, group)
            by_node = {cpus: found.count(cpus) for cpus in dict.fromkeys(found)}
            assert list(by_node.values()) == [len(ranks) for ranks in planned.values()], (sizes, workers)
            ranges = {cpus: range(found.index(cpus), found.index(cpus) + count) for cpus, count in by_node.items()}
            assert splits(ranges, group) == splits(planned, group)


def test_node_is_idle_unless_a_placement_group_holds_resources_there() -> None:
    everywhere = set(raylet.usable()[0])
    busy = ray.remote(num_cpus=4)(lambda: time.sleep(600)).remote()
    wait_for(lambda: not all_free(*raylet.usable()), "a task on the largest node")
    try:
        assert set(raylet.idle_nodes()) == everywhere
        group = ray.util.placement_group([{"CPU": 3}])
        assert group.wait(30)
        (held,) = ray.util.placement_group_table(group)["bundles_to_node_id"].values()
        assert set(raylet.idle_nodes()) == everywhere - {held}
        ray.util.remove_placement_group(group)
        wait_for(lambda: set(raylet.idle_nodes()) == everywhere, "the end of the group")
    finally:
        ray.cancel(busy, force=True)
        wait_for(lambda: all_free(*raylet.usable()), "the end of the task")


class GoneAtFirst(SomeNodes):
    """A placement whose first choice is a node that has left meanwhile."""

    tries = 0

    def choose(self, scaling: ScalingSpec) -> list[str] | None:
        self.tries += 1
        return ["f" * 56] * scaling.world if self.tries == 1 else super().choose(scaling)


def test_worker_group_is_placed_again_after_its_node_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        node = ray.get_runtime_context().get_node_id()
        (tmp_path / str(get_context().get_world_rank())).write_text(node)

    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1")
    scaling = ScalingSpec(num_workers=4, placement_strategy="SPREAD")
    Trainer(
        work,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=4, placement_strategy="SPREAD", resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(tmp_path / "ray"), callbacks=[GoneAtFirst(scaling, (1, 2, 3), group=2)]),
    ).fit()
    total, _ = raylet.usable()
    found = [total[(tmp_path / str(rank)).read_text()]["CPU"] for rank in range(4)]
    # Ray lists the nodes in any order.
    assert found in ([2.0, 2.0, 3.0, 3.0], [3.0, 3.0, 2.0, 2.0])
