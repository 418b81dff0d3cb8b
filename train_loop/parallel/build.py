"""A model with its weights, sharded over the mesh."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from train_loop.model.build import DTYPES
from train_loop.model.families.after_head import Step
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.choose import family_of
from train_loop.model.float8 import float8_linears
from train_loop.model.folder import adapter_folder
from train_loop.model.freeze import freeze
from train_loop.model.load import WeightSource, give_weights, weight_files
from train_loop.model.lora.adapters import draw_adapters, lora_checks
from train_loop.model.lora.base import DrawnWeights, base_sha256
from train_loop.model.lora.stored import fill_adapters
from train_loop.parallel.mesh import Mesh
from train_loop.parallel.passes import parallelize
from train_loop.parallel.shard import place_buffers
from train_loop.parallel.units import repeated_layers
from train_loop.plan import Float8Linears
from train_loop.run_dir import BaseWeights
from train_loop.spec import JobSpec
from train_loop.telemetry.timers import ComputeTimer


class ShardedModel(NamedTuple):
    """A model with loaded weights, sharded over the mesh."""

    anatomy: Anatomy
    timer: ComputeTimer
    """Timer of its computation."""
    after_head: tuple[Step, ...] | None
    """Steps from the head's output to the logits, so that the loss can be computed inside of it; None if unknown."""
    unused: list[str]
    """Tensors of the model's folder that the model does not use."""
    sharers: dist.ProcessGroup | None = None
    """The ranks that share its layers; None if each has whole ones."""
    base: BaseWeights | None = None
    """The frozen weights below adapters; None without adapters."""
    float8: Float8Linears | None = None
    """Linear modules that compute in float8; None without `strategy.float8`."""

    @property
    def model(self) -> nn.Module:
        """Return the model itself."""
        return self.anatomy.model


def build_sharded(spec: JobSpec, mesh: Mesh, *, needs_weights: bool = True) -> ShardedModel:
    """Build on meta, freeze, parallelize, load weights, in this order: each needs the one before. Raises ModelError.

    Without `needs_weights`, the weights are uninitialised memory that a checkpoint replaces, except those of a model
    with adapters: its checkpoints have only trained weights.
    """
    anatomy, lora = family_of(spec).build(spec.model), spec.model.lora
    model, family = anatomy.model, anatomy.family
    found = family.examine(anatomy, spec)
    for setting in (*found.settings, *lora_checks(anatomy, spec)):
        setting.check()
    family.choose_attention(model, spec, mesh.device)
    freeze(model, spec.model.freeze_module_prefix)
    blueprint = family.anatomy(copy.deepcopy(model))
    float8 = _float8(anatomy, spec)
    timer = parallelize(anatomy, mesh, spec, found.attention)
    home = torch.device("cpu") if spec.strategy.offload_policy is True else mesh.device
    # Values of the adapters in a checkpoint come later.
    adapters = adapter_folder(spec.model) if needs_weights else None
    needs_weights, drawn = needs_weights or lora is not None, DrawnWeights()
    with _readers(spec, mesh) as readers:
        hashed = drawn if lora is not None and mesh.rank == 0 else None
        source = WeightSource(needs_weights, readers if needs_weights else None, hashed)
        unused = give_weights(model, blueprint, spec.model, seed=spec.training.seed, device=home, source=source)
        if adapters is not None:
            fill_adapters(model, adapters, source.readers)
    base = None
    if lora is not None:
        dtype = DTYPES[spec.strategy.param_dtype]
        if adapters is None:
            draw_adapters(model, lora, seed=spec.training.seed, dtype=dtype, device=mesh.device)
        sha256 = base_sha256(weight_files(spec.model), drawn)
        base = BaseWeights(path=spec.model.path, sha256=sha256, quantized=spec.model.quantize_base)
    place_buffers(model, mesh.device)
    sharers = None if mesh.tp is None else mesh.tp.get_group()
    return ShardedModel(anatomy, timer, found.after_head, unused, sharers, base, float8)


def _float8(anatomy: Anatomy, spec: JobSpec) -> Float8Linears | None:
    """Return the linear modules that will compute in float8. Raises ModelError if there are none of those asked for."""
    if spec.strategy.float8 is None:
        return None
    return float8_linears(anatomy, repeated_layers(anatomy, spec.strategy.wrap_policy), spec)


@contextmanager
def _readers(spec: JobSpec, mesh: Mesh) -> Iterator[dist.ProcessGroup | None]:
    """Yield the group of the ranks of a replica, of which the first reads; None if each rank reads its own part."""
    if spec.model.load == "every_rank":
        yield None
        return
    size = mesh.plan.world // mesh.plan.ddp
    replicas = [range(first, first + size) for first in range(0, mesh.plan.world, size)]
    # Every rank creates every group. Files are read into host memory, so that gloo sends from there.
    groups = [dist.new_group([*ranks], backend="gloo") for ranks in replicas]
    try:
        yield groups[mesh.rank // size]
    finally:
        dist.destroy_process_group(groups[mesh.rank // size])
