"""A model with its weights, sharded over the mesh."""

import copy
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from train_loop.model.families.after_head import Step
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.choose import family_of
from train_loop.model.freeze import freeze
from train_loop.model.load import give_weights
from train_loop.parallel.mesh import Mesh
from train_loop.parallel.passes import parallelize
from train_loop.parallel.shard import place_buffers
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

    @property
    def model(self) -> nn.Module:
        """Return the model itself."""
        return self.anatomy.model


def build_sharded(spec: JobSpec, mesh: Mesh) -> ShardedModel:
    """Build on meta, freeze, parallelize, load weights, in this order: each needs the one before. Raises ModelError."""
    anatomy = family_of(spec).build(spec.model)
    model, family = anatomy.model, anatomy.family
    found = family.examine(anatomy, spec)
    for setting in found.settings:
        setting.check()
    family.choose_attention(model, spec, mesh.device)
    freeze(model, spec.model.freeze_module_prefix)
    blueprint = family.anatomy(copy.deepcopy(model))
    timer = parallelize(anatomy, mesh, spec, found.attention)
    home = torch.device("cpu") if spec.strategy.offload_policy else mesh.device
    unused = give_weights(model, blueprint, spec.model, seed=spec.training.seed, device=home)
    place_buffers(model, mesh.device)
    sharers = None if mesh.tp is None else mesh.tp.get_group()
    return ShardedModel(anatomy, timer, found.after_head, unused, sharers)
