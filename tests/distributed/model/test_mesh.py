"""Process groups of a running mesh, compared with the plan."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.builders.specs import spec
from tests.support.ranks.ranks import on_ranks
from train_loop.errors import UserError
from train_loop.parallel.mesh import build_mesh
from train_loop.plan import plan_mesh
from train_loop.run import with_shards_per_host

# world 4: fsdp_size, ulysses_size, sharded
MESHES = [
    (0, 1, True),
    (0, 2, True),
    (0, 4, True),
    (2, 1, True),
    (2, 2, True),
    (9, 2, True),
    (0, 1, False),
    (0, 2, False),
]


def groups() -> list[dict[str, Any]]:
    """Return the groups of this rank, for every mesh."""
    found = []
    for fsdp_size, sp, sharded in MESHES:
        plan = plan_mesh(world=4, fsdp_size=fsdp_size, ulysses_size=sp, sharded=sharded)
        mesh = build_mesh(plan, torch.device("cpu"))
        members = {name: dist.get_process_group_ranks(mesh.fsdp.get_group(name)) for name in plan.names}
        axes = dict(zip(mesh.fsdp.mesh_dim_names or (), mesh.fsdp.shape, strict=True))
        places = {"data": mesh.data_rank, "sequence": mesh.sequence_rank}
        found.append(places | members | {"sp": dist.get_process_group_ranks(mesh.sp), "axes": axes})
    return found


HOSTS = {"one host": (4, 4, 4, 4), "two hosts": (2, 2, 2, 2), "three hosts": (2, 2, 1, 1), "no sequences": (3, 3, 3, 1)}
"""The number of workers on the host of each rank."""


def sizes_of_hosts() -> dict[str, Any]:
    """Return the strategy that `fsdp_size: node` becomes on each kind of hosts, or the error."""
    found: dict[str, Any] = {}
    for name, local_sizes in HOSTS.items():
        os.environ["LOCAL_WORLD_SIZE"] = str(local_sizes[dist.get_rank()])
        for peers in (1, 2):
            strategy = {"sharding_strategy": "HYBRID_SHARD", "ulysses_size": peers}
            try:
                found[f"{name}, {peers}"] = with_shards_per_host(
                    spec(strategy=strategy, scaling={"num_workers": 4})
                ).strategy.shards
            except UserError as error:
                found[f"{name}, {peers}"] = str(error)
    return found


def groups_and_sizes() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return groups(), sizes_of_hosts()


@pytest.fixture(scope="module")
def results() -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    return on_ranks(4, groups_and_sizes)


@pytest.fixture(scope="module")
def ranks(results: Any) -> list[list[dict[str, Any]]]:
    return [found for found, _ in results]


def test_node_becomes_the_workers_of_a_host(results: Any) -> None:
    for _, found in results:
        assert {name: size for name, size in found.items() if isinstance(size, int)} == {
            "one host, 1": 4,
            "one host, 2": 4,
            "two hosts, 1": 2,
            "two hosts, 2": 2,
        }
        assert found["three hosts, 1"].startswith(
            "fsdp_size=node finds no equal groups of several workers: hosts run 1, 2 of 4 workers"
        )
        assert "in multiples of 2; start the same number on each host" in found["no sequences, 2"]


@pytest.mark.parametrize("number", range(len(MESHES)))
def test_plan_and_running_mesh_agree(ranks: list[list[dict[str, Any]]], number: int) -> None:
    fsdp_size, sp, sharded = MESHES[number]
    plan = plan_mesh(world=4, fsdp_size=fsdp_size, ulysses_size=sp, sharded=sharded)
    for rank, meshes in enumerate(ranks):
        found = meshes[number]
        assert {**found["axes"], "sp": len(found["sp"])} == plan.axes
        assert (found["data"], found["sequence"]) == (plan.data_rank(rank), plan.sequence_rank(rank))
        assert found["sp"] == [r for r in range(4) if plan.data_rank(r) == plan.data_rank(rank)]
        # Shards are neighbours, replicas are an fsdp group apart, and Ulysses groups lie inside either.
        assert found["fsdp"] == list(range(rank - rank % plan.fsdp, rank - rank % plan.fsdp + plan.fsdp))
        if "ddp" in found:
            assert found["ddp"] == list(range(rank % plan.fsdp, 4, plan.fsdp))
