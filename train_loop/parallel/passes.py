"""Parallelization of a built model: one ordered tuple of passes, each of which changes the model in place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.fsdp import FSDPModule

from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.family import AttentionUse
from train_loop.model.float8 import convert_linears, float8_linears
from train_loop.model.lora.adapters import inject_adapters
from train_loop.model.quantize import quantize_layers
from train_loop.parallel.layers import apply_checkpointing, apply_compile, apply_tiled_mlp, tiled_mlps
from train_loop.parallel.mesh import Mesh
from train_loop.parallel.sequence_part import SequencePart
from train_loop.parallel.shard import apply_fsdp, apply_prefetch, time_units, timing_exchanges
from train_loop.parallel.ulysses import apply_ulysses
from train_loop.parallel.units import (
    check_precision,
    check_selective,
    expert_units,
    innermost,
    repeated_layers,
    wrapped_layers,
)
from train_loop.plan import MeshPlan, needs_units
from train_loop.spec import BudgetSpec, JobSpec
from train_loop.telemetry.timers import ComputeTimer


@dataclass(frozen=True)
class BuiltModel:
    """A model on the meta device, and all that passes need except the mesh."""

    anatomy: Anatomy
    spec: JobSpec
    attention: Mapping[str, AttentionUse]
    """Modules whose heads ranks share, by name."""
    timer: ComputeTimer


class Pass(Protocol):
    """A change to a built model."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return whether a job needs the change."""

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Change the model in place. Raises ModelError for a model that cannot be changed."""


class Adapters:
    """Low-rank adapters of frozen weights (LoRA)."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return whether the spec asks for adapters."""
        return spec.model.lora is not None

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Put a layer with adapters around each target."""
        inject_adapters(built.anatomy, built.spec.model)


class Quantize:
    """Frozen linear layers below adapters are stored in few bits (QLoRA)."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return whether the spec asks for a quantised base."""
        return spec.model.quantize_base is not None

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Replace the layers' modules."""
        assert built.spec.model.quantize_base is not None, "the spec asks for it"
        layers = repeated_layers(built.anatomy, built.spec.strategy.wrap_policy)
        quantize_layers(built.anatomy, layers, built.spec.model.quantize_base)


class Positions:
    """Each document uses the position factors of its own length, whichever part of it a rank has."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return True; only the model shows whether it has such factors."""
        return True

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Change the model's rotary embeddings."""
        anatomy = built.anatomy
        anatomy.family.fit_positions(anatomy.model, part=mesh.sequence_rank, parts=mesh.plan.sp)


class Float8:
    """Linear modules of the layers compute in float8."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return whether the spec asks for float8."""
        return spec.strategy.float8 is not None

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Replace the modules. Raises UserError where they cannot compute."""
        anatomy, layers = built.anatomy, repeated_layers(built.anatomy, built.spec.strategy.wrap_policy)
        found = float8_linears(anatomy, layers, built.spec)
        convert_linears(anatomy, found.names, built.spec, shards=mesh.plan.fsdp, device=mesh.device)


class Layers:
    """Ranks share each layer (tensor parallelism), and the tokens between its projections (sequence parallelism)."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return whether several ranks share a layer."""
        return mesh.tp > 1

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Split the layers by the plan of the model's family."""
        assert mesh.tp is not None, "the plan has this axis"
        anatomy, split_states = built.anatomy, built.spec.strategy.sequence_parallel
        with timing_exchanges(anatomy.model, built.timer):
            anatomy.family.share_layers(anatomy, mesh.tp, built.attention, split_states=split_states)
        if split_states:
            anatomy.family.split_states(anatomy, mesh.tp, built.attention, built.timer)


class Experts:
    """Ranks share the experts of each layer (expert parallelism)."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return whether ranks have different experts of a layer."""
        return mesh.ep > 1

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Split the experts by the plan of the model's family."""
        assert mesh.experts is not None, "the plan has this axis"
        # With parts of the tokens, no rank has those of another.
        tokens = mesh.experts.alone if built.spec.strategy.sequence_parallel else mesh.experts.tokens
        built.anatomy.family.share_experts(built.anatomy, mesh.experts.ep, tokens)


class Sequence:
    """Ranks share each sequence (Ulysses)."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return whether several ranks share a sequence."""
        return mesh.sp > 1

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Exchange sequence parts for heads around attention, or let the model do so."""
        anatomy, part = built.anatomy, SequencePart(mesh.sp, built.timer)
        if anatomy.family.split_sequence(anatomy.model, part):
            part.watch(anatomy.model)
        else:
            attention = anatomy.family.heads_of_rank(anatomy.model, built.attention, mesh.plan.tp)
            apply_ulysses(anatomy, mesh.sp, built.timer, attention)


class Tiles:
    """MLPs compute in tiles of tokens."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return whether the spec asks for tiles."""
        return spec.strategy.apply_tiled_mlp

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Split the MLP of each layer, and in a mixture of experts the dense ones."""
        strategy = built.spec.strategy
        layers = repeated_layers(built.anatomy, strategy.wrap_policy)
        apply_tiled_mlp(tiled_mlps(built.anatomy, layers), tiles=strategy.tiled_num_shards)


class Recompute:
    """Backward recomputes the activations of each layer."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return whether the spec asks for activation checkpointing, and not the compiler by a budget."""
        how = spec.model.gradient_checkpointing
        return how != "none" and not isinstance(how, BudgetSpec)

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Checkpoint the layers; their routers choose the same experts twice."""
        layers, experts = repeated_layers(built.anatomy, built.spec.strategy.wrap_policy), built.anatomy.experts
        routers = () if experts is None else experts.routers
        pin = built.spec.strategy.pin_memory and mesh.device.type == "cuda"
        apply_checkpointing(layers, built.spec.model.gradient_checkpointing, pin_memory=pin, routers=routers)


class Compile:
    """torch.compile translates the innermost units, or the model if it has none."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return whether the spec asks for compilation."""
        return spec.model.compile

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Compile each unit that contains no other."""
        layers = innermost(wrapped_layers(built.anatomy, built.spec.strategy.wrap_policy))
        how = built.spec.model.gradient_checkpointing
        budget = how.budget if isinstance(how, BudgetSpec) else None
        apply_compile(layers or [built.anatomy.model], budget=budget)


class Shard:
    """FSDP2 shards parameters, gradients and optimizer states."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return True: a single rank that trains has units too, which hold master weights in another dtype."""
        return True

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Make the units, if the model needs any, and set how far each gathers ahead."""
        anatomy, strategy = built.anatomy, built.spec.strategy
        check_precision(anatomy, built.spec)
        check_selective(anatomy, built.spec)
        if not needs_units(built.spec, mesh.plan, is_mixture=anatomy.experts is not None):
            return
        # Found by class name, before FSDP2 changes the names of classes.
        layers, experts = wrapped_layers(anatomy, strategy.wrap_policy), expert_units(anatomy, strategy.wrap_policy)
        if mesh.experts is not None and anatomy.experts is not None:
            experts = [*anatomy.experts.modules]
        apply_fsdp(anatomy, mesh, strategy, router_dtype=built.spec.model.router_dtype)
        units = [layer for layer in layers if isinstance(layer, FSDPModule)]
        forward, backward = strategy.forward_prefetch, strategy.backward_prefetch
        apply_prefetch(units, forward=forward, backward=backward, experts=experts)


class Timing:
    """The rank's timer stops while units wait for other ranks."""

    def applies(self, spec: JobSpec, mesh: MeshPlan) -> bool:
        """Return True; every run reports the compute time of its ranks."""
        return True

    def apply(self, built: BuiltModel, mesh: Mesh) -> None:
        """Register the timer's hooks around those of FSDP2."""
        time_units(built.anatomy.model, built.timer)


# Adapters are part of the model for all other passes, and decide which weights are frozen. Changes of a layer's
# parameters or inputs come next. Then each pass wraps the results of the passes before it: recomputation repeats tiles
# and exchanges, compilation translates both, and FSDP2's hooks are outside of all, so that a layer is gathered once.
# `Quantize` and `Float8` replace modules, and so come before passes that keep their calls or parameters. `Layers` and
# `Experts` come before `Sequence`, which counts the heads of a rank, and before `Shard`, which shards its remaining
# part. Timing hooks surround those of FSDP2 and come last.
PASSES: tuple[Pass, ...] = (
    Adapters(),
    Quantize(),
    Positions(),
    Float8(),
    Layers(),
    Experts(),
    Sequence(),
    Tiles(),
    Recompute(),
    Compile(),
    Shard(),
    Timing(),
)


def parallelize(anatomy: Anatomy, mesh: Mesh, spec: JobSpec, attention: Mapping[str, AttentionUse]) -> ComputeTimer:
    """Parallelize a model on the meta device, in place; return the timer of its computation. Raises ModelError.

    `attention` names the modules whose attention Ulysses splits.
    """
    built = BuiltModel(anatomy, spec, attention, ComputeTimer(mesh.device))
    for one in PASSES:
        if one.applies(spec, mesh.plan):
            one.apply(built, mesh)
    return built.timer
