"""Process groups of a running mesh, compared with the plan."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks.ranks import on_ranks
from train_loop.parallel.mesh import build_mesh
from train_loop.plan import plan_mesh

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


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    return on_ranks(4, groups)


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
