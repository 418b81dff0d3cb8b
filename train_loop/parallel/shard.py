"""Parallelization of a model, in this order: Ulysses → tiles → activation checkpointing → compile → FSDP2 → timing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.positions import apply_longrope
from train_loop.model.probe import AttentionUse
from train_loop.model.tiled_mlp import apply_tiled_mlp
from train_loop.parallel.activation_checkpoint import apply_checkpointing
from train_loop.parallel.compile import apply_compile
from train_loop.parallel.mesh import Mesh
from train_loop.parallel.timing import time_units
from train_loop.parallel.ulysses import apply_ulysses
from train_loop.parallel.units import find_units, innermost, repeated_layers, wrapped_layers
from train_loop.spec import JobSpec, StrategySpec
from train_loop.telemetry.timers import ComputeTimer


def parallelize(anatomy: Anatomy, mesh: Mesh, spec: JobSpec, attention: Mapping[str, AttentionUse]) -> ComputeTimer:
    """Parallelize a model on the meta device, in place; return the timer of its computation. Raises ModelError.

    `attention` names the modules whose attention comes from the transformers registry.
    """
    model = anatomy.model
    mode, strategy, timer = spec.model.gradient_checkpointing, spec.strategy, ComputeTimer(mesh.device)
    apply_longrope(model, part=mesh.sequence_rank, parts=mesh.plan.sp)
    apply_ulysses(model, mesh.sp, timer, attention)
    layers = repeated_layers(anatomy, strategy.wrap_policy)
    if strategy.apply_tiled_mlp:
        apply_tiled_mlp(layers, tiles=strategy.tiled_num_shards)
    if mode != "none":
        apply_checkpointing(layers, offload=mode == "offload", pin_memory=mesh.device.type == "cuda")
    # Found by class name, before FSDP2 changes the names of classes.
    wrapped = wrapped_layers(anatomy, strategy.wrap_policy)
    if spec.model.compile:
        apply_compile(innermost(wrapped))
    apply_fsdp(anatomy, mesh, strategy)
    units = [layer for layer in wrapped if isinstance(layer, FSDPModule)]
    apply_prefetch(units, forward=strategy.forward_prefetch, backward=strategy.backward_prefetch)
    time_units(model, timer)
    return timer


def apply_fsdp(anatomy: Anatomy, mesh: Mesh, strategy: StrategySpec) -> None:
    """Shard each unit, then the rest as the root unit; gradients are plain sums over all ranks."""
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if strategy.offload_policy else OffloadPolicy()
    policy = MixedPrecisionPolicy(DTYPES[strategy.param_dtype], DTYPES[strategy.reduce_dtype])

    def shard(unit: list[nn.Module], mixed: MixedPrecisionPolicy) -> None:
        # A single module is passed alone: a list would stay gathered until the last of its modules has run.
        module = unit if len(unit) > 1 else unit[0]
        reshard = strategy.reshard_after_forward
        fully_shard(module, mesh=mesh.fsdp, mp_policy=mixed, offload_policy=offload, reshard_after_forward=reshard)

    # Found by class name, before FSDP2 changes the names of norms, which may be units themselves.
    units = find_units(anatomy, strategy.wrap_policy)
    if strategy.norm_dtype is not None:
        keep = MixedPrecisionPolicy(
            DTYPES[strategy.norm_dtype], policy.reduce_dtype, output_dtype=policy.param_dtype, cast_forward_inputs=False
        )
        for norm in anatomy.norms:
            shard([norm], keep)
    for unit in units:
        if not isinstance(unit[0], FSDPModule):
            shard(unit, policy)
    shard([anatomy.model], replace(policy, output_dtype=strategy.output_dtype and DTYPES[strategy.output_dtype]))
    for module in anatomy.model.modules():
        # A single rank has nothing to sum, but would divide every gradient by the factor.
        if isinstance(module, FSDPModule) and mesh.plan.world > 1:
            _sum_gradients(module)


def _sum_gradients(unit: FSDPModule) -> None:
    unit.set_gradient_divide_factor(1.0)
    # A factor selects PREMUL_SUM, which gloo rejects and NCCL zeroes in bf16 (pytorch#190747).
    unit.set_force_sum_reduction_for_comms(True)


def apply_prefetch(layers: Sequence[FSDPModule], *, forward: int, backward: int) -> None:
    """Make each layer prefetch the next `forward` layers, and in backward the previous `backward` layers.

    A value of 1 leaves prefetching to FSDP, which gathers one layer ahead in the order that it has seen. The root is
    not changed.
    """
    for place, layer in enumerate(layers):
        if forward > 1:
            layer.set_modules_to_forward_prefetch(list(layers[place + 1 : place + 1 + forward]))
        if backward > 1:
            layer.set_modules_to_backward_prefetch(list(reversed(layers[max(place - backward, 0) : place])))


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the device on which the model computes, wherever its parameters are."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
