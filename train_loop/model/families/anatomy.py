"""The parts of a model that the loop treats differently, whatever its family calls them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.spec import TrainingSpec

if TYPE_CHECKING:
    from train_loop.model.families.family import Family


@dataclass(frozen=True)
class Fused:
    """A tensor [E, M, N] of a gate and another projection of each expert."""

    dim: int
    """Dimension of the outputs of both."""
    alternates: bool
    """True if outputs of both take turns, false if one half follows the other."""

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return views of the two projections."""
        if self.alternates:
            return torch.unflatten(tensor, self.dim, (-1, 2)).unbind(self.dim + 1)
        return tensor.chunk(2, self.dim)


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture of experts: a token uses some of those of each layer, which a router chooses."""

    modules: tuple[nn.Module, ...]
    """Modules that hold all experts of a layer, in execution order: one tensor for each projection."""
    routers: tuple[nn.Module, ...]
    number: int
    """Number of experts of a layer."""
    chosen: int
    """Number of experts of a layer that a token uses."""
    auxiliary: float | None = None
    """Weight of the auxiliary loss by the model's own config; None if its code has none."""
    corrections: Mapping[int, tuple[nn.Module, str]] = field(default_factory=dict)
    """Module and name of the bias that a router adds to its scores to choose experts, by its place among `modules`."""

    @property
    def idle(self) -> int:
        """Return the number of parameters of experts that a token does not use, in all layers together."""
        total = sum(p.numel() for module in self.modules for p in module.parameters())
        return total * (self.number - self.chosen) // self.number

    @property
    def largest(self) -> int:
        """Return the number of parameters of all experts of the layer with most of them."""
        return max(sum(p.numel() for p in module.parameters()) for module in self.modules)

    @property
    def balanced(self) -> dict[int, tuple[nn.Module, str]]:
        """Return the corrections of routers that are trained: the choices of frozen ones stay as they are."""
        return {
            place: bias
            for place, bias in self.corrections.items()
            if any(p.requires_grad for p in self.routers[place].parameters())
        }

    @property
    def matrices(self) -> set[int]:
        """Return the ids of tensors [E, M, N] with a matrix of each expert, or two."""
        return {id(p) for module in self.modules for p in module.parameters() if p.ndim == 3}

    @property
    def fused(self) -> dict[int, Fused]:
        """Return how the two matrices of each expert are fused in some of these tensors, by id."""
        gated: list[Any] = [module for module in self.modules if hasattr(module, "gate_up_proj")]
        return {id(one.gate_up_proj): Fused(1 + one.is_transposed, not one.is_concatenated) for one in gated}

    def loss_depends_on_micro_batch(self, training: TrainingSpec) -> bool:
        """Return whether other micro-batches of the same step have another loss: routers' are means over each of them.

        Every other loss is a sum over tokens, rows or groups of rows that stay together.
        """
        rule = training.router_aux_loss
        auxiliary = (self.auxiliary or 0.0) if rule.coef is None else rule.coef
        return rule.scope == "micro" and bool(auxiliary or training.router_z_loss)

    def named(self, names: Iterable[str]) -> list[nn.Module]:
        """Return the modules whose experts have one of the names, or had it when each was a module.

        Call it before FSDP2 changes the names of classes.
        """
        return [module for module in self.modules if any(self.is_named(module, name) for name in names)]

    def is_named(self, module: nn.Module, name: str) -> bool:
        """Return whether the experts of a module have a name: that of its class, or with MLP or Expert at its end."""
        stem = type(module).__name__.removesuffix("Experts")
        return name.startswith(stem) and name.endswith(("Experts", "Expert", "MLP"))


@dataclass(frozen=True)
class Anatomy:
    """A built model and its parts. Its family finds them before FSDP2 changes the classes of modules."""

    model: nn.Module
    family: "Family"
    layers: tuple[nn.Module, ...]
    """Repeated blocks in execution order, by the model's own statement; empty if it makes none."""
    embeddings: nn.Module | None
    """Table of token vectors; None if the model reads no tokens."""
    head: nn.Module | None
    """Linear map from hidden states to logits, of tokens or of labels; None if the model has none."""
    norms: tuple[nn.Module, ...]
    depth: int
    """Number of layers with attention."""
    attention_width: int
    """Number of attention heads x size of a head."""

    labels: int | None = None
    """Number of labels of which the head gives logits; None if these are of tokens."""
    experts: Experts | None = None
    """Experts and their routers; None if the model is dense."""
    undecayed: frozenset[tuple[nn.Module, str]] = frozenset()
    """Parameters that the model's own code keeps from weight decay, by module and name there."""

    @property
    def vocabulary(self) -> int | None:
        """Return the number of tokens that the model has vectors for; None if it reads no tokens."""
        return _rows(self.embeddings)

    @property
    def outputs(self) -> int:
        """Return the number of values that the head gives; 0 without one."""
        return _rows(self.head) or 0

    @property
    def is_tied(self) -> bool:
        """Return whether embeddings and head are one parameter."""
        if self.embeddings is None or self.head is None:
            return False
        return self.embeddings.get_parameter("weight") is self.head.get_parameter("weight")

    def check_rows(self, vocabulary: int) -> None:
        """Raise ModelError if embeddings or head have fewer rows than the config has tokens."""
        known = (_rows(one) for one in (self.embeddings, self.head if self.labels is None else None))
        rows = min((rows for rows in known if rows is not None), default=vocabulary)
        if rows < vocabulary:
            raise ModelError(
                f"{type(self.model).__name__} has embeddings for {rows} tokens, and its config says vocab_size="
                f"{vocabulary}; correct the vocabulary sizes of the config"
            )


def _rows(module: nn.Module | None) -> int | None:
    return None if module is None else len(module.get_parameter("weight"))


def modules_of(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Return the modules below the root whose class has one of the names."""
    wanted = set(names)
    return [module for module in model.modules() if module is not model and type(module).__name__ in wanted]


def plain_linears(anatomy: Anatomy, layers: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the linear modules inside of layers in module order, without those of experts and routers.

    Subclasses are left out: they may use their weight without a call, as attention of `nn.MultiheadAttention` does.
    """
    experts = anatomy.experts
    routed = () if experts is None else (*experts.modules, *experts.routers)
    inside = {part for module in routed for part in module.modules()}
    found = (one for layer in layers for one in layer.modules() if type(one) is nn.Linear and one not in inside)
    return list(dict.fromkeys(found))


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer with parameters of its own."""
    return "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False))
