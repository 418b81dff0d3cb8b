"""The device mesh and process groups of a run, built from a mesh plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from train_loop.errors import UserError
from train_loop.plan import Axis, MeshPlan


@dataclass(frozen=True)
class ExpertMesh:
    """The meshes of parameters of experts, if ranks hold different experts."""

    ep: DeviceMesh
    """The mesh with axis [ep] of the ranks that have all experts of a layer together."""
    efsdp: DeviceMesh
    """The mesh for `fully_shard` of experts, with axes [efsdp], or [ddp, efsdp] for HSDP."""
    tokens: DeviceMesh
    """The mesh of the ranks that have the same samples and share layers: that of tp, or this rank alone."""
    alone: DeviceMesh
    """The mesh of this rank alone."""


@dataclass(frozen=True)
class Mesh:
    """The meshes and process groups of this rank."""

    plan: MeshPlan
    rank: int
    device: torch.device
    fsdp: DeviceMesh
    """The mesh for `fully_shard`, with axes [fsdp], or [ddp, fsdp] for HSDP."""
    sp: dist.ProcessGroup
    """The process group of the ranks that share a sequence."""
    peers: dist.ProcessGroup
    """The process group of the ranks that have the same samples, along sp and tp."""
    tp: DeviceMesh | None = None
    """The mesh with axis [tp] of the ranks that split layers; None if each rank has whole layers."""
    experts: ExpertMesh | None = None
    """The meshes of experts; None if each rank has all experts of its layers."""
    wholes: DeviceMesh | None = None
    """The mesh with axes [ddp, fsdp] of parameters that each rank holds whole, ddp is the world; None without any."""

    @property
    def data_rank(self) -> int:
        """Return the data-parallel rank."""
        return self.plan.data_rank(self.rank)

    @property
    def sequence_rank(self) -> int:
        """Return the rank within the Ulysses group."""
        return self.plan.sequence_rank(self.rank)

    @property
    def leads(self) -> bool:
        """Return whether this rank is the first of those with its samples."""
        return self.plan.leads(self.rank)


def local_device(local_rank: int) -> torch.device:
    """Return the GPU with this rank's local number and make it current, or the CPU without GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def build_mesh(
    plan: MeshPlan, device: torch.device, *, timeout: timedelta = timedelta(minutes=30), wholes: bool = False
) -> Mesh:
    """Build the groups of a plan over all ranks; a collective call. Collectives time out after `timeout`.

    `wholes` adds the mesh of parameters that each rank holds whole, if the plan shards the others.
    Raises UserError if the number of started ranks differs from the plan.
    """
    started = dist.get_world_size()
    if started != plan.world:
        raise UserError(
            f"num_workers={plan.world}, but {started} ranks started; start {plan.world}, or change the spec"
        )
    parameters, samples = (_device_mesh(device, axes) for axes in (plan.parameters, plan.samples))
    sequence = samples.get_group("sp")
    peers = sequence if plan.tp == 1 else samples["sp", "tp"]._flatten("peers").get_group()
    for group in (*parameters.get_all_groups(), *samples.get_all_groups(), peers):
        # A mesh accepts no timeout: without this call its groups use torch's default of 30 min.
        _set_pg_timeout(timeout, group)
    shards, tp = (parameters, None) if plan.tp == 1 else (parameters[plan.names[:-1]], parameters["tp"])
    experts = None if plan.ep == 1 else _build_experts(plan, device, tp, timeout)
    copies = _build_wholes(plan, device, timeout) if wholes and plan.fsdp > 1 else None
    return Mesh(plan, dist.get_rank(), device, shards, sequence, peers, tp, experts, copies)


def _build_wholes(plan: MeshPlan, device: torch.device, timeout: timedelta) -> DeviceMesh:
    mesh = _device_mesh(device, (Axis("ddp", "replicate", plan.world), Axis("fsdp", "shard", 1)))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)
    return mesh


def _build_experts(plan: MeshPlan, device: torch.device, tp: DeviceMesh | None, timeout: timedelta) -> ExpertMesh:
    """Build the groups of experts. A mesh slices axes of one grid only, so the rank alone is an axis of it, too."""
    grid = _device_mesh(device, (*plan.experts, Axis("alone", "tensor", 1)))
    for group in grid.get_all_groups():
        _set_pg_timeout(timeout, group)
    *shards, ep = (axis.name for axis in plan.experts)
    alone = grid["alone"]
    return ExpertMesh(grid[ep], grid[tuple(shards)], tokens=alone if tp is None else tp, alone=alone)


def _device_mesh(device: torch.device, axes: Sequence[Axis]) -> DeviceMesh:
    names = tuple(axis.name for axis in axes)
    return init_device_mesh(device.type, tuple(axis.size for axis in axes), mesh_dim_names=names)
