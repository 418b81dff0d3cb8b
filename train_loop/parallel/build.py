"""A model with its weights, sharded over the mesh."""

import copy
from typing import NamedTuple

import torch
from torch import nn

from train_loop.model.attention import apply_attention
from train_loop.model.build import DTYPES, build_model
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal import causal_anatomy
from train_loop.model.freeze import freeze
from train_loop.model.load import give_weights
from train_loop.model.probe import check_attention, check_head, check_positions, probe
from train_loop.model.separation import check_causal, check_packing
from train_loop.model.supported import check_dense
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
    head_is_last: bool
    """True if the head is the model's last operation, so that the loss can be computed inside of it."""
    unused: list[str]
    """Tensors of the model's folder that the model does not use."""

    @property
    def model(self) -> nn.Module:
        """Return the model itself."""
        return self.anatomy.model


def build_sharded(spec: JobSpec, mesh: Mesh) -> ShardedModel:
    """Build on meta, freeze, parallelize, load weights, in this order: each needs the one before. Raises ModelError."""
    model = build_model(spec.model)
    check_dense(model)
    seen = probe(model, DTYPES[spec.strategy.param_dtype], sequence_length=spec.data.sequence_length)
    check_causal(seen.separation, model)
    check_packing(seen.separation, spec, seen.model)
    check_attention(seen, spec)
    check_head(seen, spec)
    check_positions(seen, spec)
    apply_attention(model, spec, mesh.device)
    freeze(model, spec.model.freeze_module_prefix)
    blueprint = copy.deepcopy(model)
    anatomy = causal_anatomy(model)
    timer = parallelize(anatomy, mesh, spec, seen.attention)
    home = torch.device("cpu") if spec.strategy.offload_policy else mesh.device
    unused = give_weights(model, blueprint, spec.model, seed=spec.training.seed, device=home)
    place_buffers(model, mesh.device)
    return ShardedModel(anatomy, timer, seen.head_is_last, unused)
