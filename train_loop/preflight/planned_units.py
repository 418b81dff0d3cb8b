"""The FSDP units of a model before it is trained: made by `fully_shard` itself, on the meta device."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from train_loop.model.families.anatomy import Anatomy
from train_loop.parallel.mesh import Mesh
from train_loop.parallel.shard import apply_fsdp
from train_loop.parallel.unit_tree import unit_tree
from train_loop.plan import MeshPlan, UnitTree
from train_loop.spec import JobSpec

_ALONE = MeshPlan(ddp=1, fsdp=1, sp=1)


def planned_units(anatomy: Anatomy, spec: JobSpec) -> UnitTree | None:
    """Return the units of a model on the meta device, which becomes sharded; None if FSDP2 rejects it.

    Units do not depend on the number of ranks, except that experts which ranks share are units.
    """
    strategy, experts = spec.strategy, anatomy.experts
    if strategy.ep_size > 1 and experts is not None:
        classes = tuple(dict.fromkeys(type(one).__name__ for one in experts.modules))
        policy = strategy.wrap_policy.model_copy(update={"moe_experts": classes})
        strategy = strategy.model_copy(update={"wrap_policy": policy})
    # The workers report the error with its reason; errors of models have no common class.
    with suppress(Exception), _rank_alone():
        apply_fsdp(anatomy, _mesh(), strategy, router_dtype=spec.model.router_dtype)
        return unit_tree(anatomy.model)
    return None


def _mesh() -> Mesh:
    shards, group = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)), dist.group.WORLD
    assert group is not None, "the process group of this rank alone"
    return Mesh(_ALONE, 0, torch.device("cpu"), shards, sp=group, peers=group)


@contextmanager
def _rank_alone() -> Iterator[None]:
    """Join a process group of one rank that exchanges nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
