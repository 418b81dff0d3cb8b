"""The order in which a model is made parallel: Ulysses → activation checkpointing → FSDP2, layers before the root."""

import functools

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from train_loop.parallel.mesh import Mesh
from train_loop.parallel.ulysses import Ulysses, apply_ulysses
from train_loop.spec import JobSpec, StrategySpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parallelize(model: PreTrainedModel, mesh: Mesh, spec: JobSpec) -> Ulysses | None:
    """Make a model on the meta device parallel, in place."""
    ulysses = apply_ulysses(model, mesh.sp)
    layers = decoder_layers(model)
    if spec.model.gradient_checkpointing == "full":
        apply_checkpointing(layers)
    apply_fsdp(model, layers, mesh, spec.strategy)
    return ulysses


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that the model itself says must not be split. Raises ValueError where it names none."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no module of its own _no_split_modules={sorted(names)} to shard by"
        )
    return layers


def apply_checkpointing(layers: list[nn.Module]) -> None:
    """Recompute each layer in the backward pass (Chen et al., 2016).

    Inside the layer's call, so that FSDP's hooks gather its parameters once for recomputed forward and backward.
    """
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def apply_fsdp(model: nn.Module, layers: list[nn.Module], mesh: Mesh, strategy: StrategySpec) -> None:
    """Shard each layer, then what is left as the root unit; gradients are plain sums over all ranks."""
    policy = MixedPrecisionPolicy(DTYPES[strategy.param_dtype], DTYPES[strategy.reduce_dtype])
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=strategy.reshard_after_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A factor selects PREMUL_SUM, which gloo refuses and NCCL zeroes in bf16 (pytorch#190747); one rank has
            # nothing to reduce and refuses the switch.
            if mesh.plan.fsdp > 1:
                module.set_force_sum_reduction_for_comms(True)
