"""Optimizers of a sharded model, and gradient clipping."""

from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from train_loop.model.families.anatomy import Anatomy, Experts
from train_loop.optim.adafactor import Adafactor
from train_loop.optim.by_mesh import ByMesh, by_mesh
from train_loop.optim.eight_bit import adamw_8bit_class
from train_loop.optim.host_state import HostState
from train_loop.optim.muon import Muon
from train_loop.spec import TrainingSpec
from train_loop.telemetry.timers import ComputeTimer

Group = dict[str, Any]
T = TypeVar("T", bound=Optimizer)


class Place(NamedTuple):
    """The memory of an optimizer's state."""

    on_host: bool = False
    """True for host memory, false for that of the parameters."""
    pin_memory: bool = False


BESIDE_PARAMETERS = Place()


def build_optimizers(
    anatomy: Anatomy, training: TrainingSpec, place: Place = BESIDE_PARAMETERS
) -> tuple[Optimizer, ...]:
    """Build the spec's optimizer for all trained parameters; muon leaves some of them to a second one, AdamW.

    Raises UserError if a package that it needs is not installed.
    """
    parameters = [p for p in anatomy.model.parameters() if p.requires_grad]
    if training.optimizer != "muon":
        return (_build(training.optimizer, parameters, training, anatomy.experts, place),)
    matrices = muon_matrices(anatomy)
    parts = {
        "muon": [p for p in parameters if id(p) in matrices],
        "adamw": [p for p in parameters if id(p) not in matrices],
    }
    return tuple(_build(name, part, training, anatomy.experts, place) for name, part in parts.items() if part)


def muon_matrices(anatomy: Anatomy) -> set[int]:
    """Return the ids of the parameters that muon updates, frozen or not.

    Orthogonal updates are for matrices that map between spaces, also those of experts; embeddings and head are tables
    of vectors, and biases of experts are vectors.
    """
    tables = [one for one in anatomy.model.modules() if isinstance(one, nn.Embedding) or one is anatomy.head]
    rows = {id(p) for table in tables for p in table.parameters()}
    found = {id(p) for p in anatomy.model.parameters() if p.ndim == 2} - rows
    experts = anatomy.experts
    return found if experts is None else (found - experts.biases) | experts.matrices


def _build(
    name: str, parameters: list[nn.Parameter], training: TrainingSpec, experts: Experts | None, place: Place
) -> Optimizer:
    biases: Container[int] = () if experts is None else experts.biases
    groups, lr = list(_groups(parameters, training.weight_decay, biases)), training.learning_rate
    if name == "sgd":
        # Set explicitly: torch's default for sharded tensors processes one at a time.
        return _class(SGD, parameters, place)(groups, lr, momentum=_momentum(training, 0.9), foreach=True)
    if name == "adafactor":
        return Adafactor(groups, lr)
    if name == "muon":
        both = {} if experts is None else experts.fused
        return _class(Muon, (), place)(
            groups, lr, momentum=_momentum(training, 0.95), adjust_lr_fn="match_rms_adamw", fused=both
        )
    betas, eps = (training.adam_beta1, training.adam_beta2), training.adam_epsilon
    if name == "adamw_8bit":
        return adamw_8bit_class()(groups, lr, betas=betas, eps=eps)
    # On CPUs the bits of the fused step depend on how parameters are sharded; on GPUs they do not.
    fused = training.reproducible == "same_size" or all(p.is_cuda for p in parameters)
    return _class(AdamW, parameters, place)(groups, lr, betas=betas, eps=eps, fused=fused, foreach=not fused)


def _class(kind: type[T], parameters: Iterable[Tensor], place: Place) -> type[T]:
    """Return a class of optimizers for a place of their state, and for lists of parameters on several meshes."""
    bases: list[type[Optimizer]] = [HostState] if place.on_host else []
    if len(by_mesh(parameters)) > 1:
        bases.append(ByMesh)
    values = {"pin_memory": place.pin_memory}
    return cast("type[T]", type(kind.__name__, (*bases, kind), values)) if bases else kind


def _groups(parameters: list[nn.Parameter], weight_decay: float, biases: Container[int]) -> Iterator[Group]:
    """Yield parameter groups with weight decay for matrices, and none for norms and biases."""
    matrices = [p for p in parameters if p.ndim >= 2 and id(p) not in biases]
    rest = [p for p in parameters if p.ndim < 2 or id(p) in biases]
    for members, decay in ((matrices, weight_decay), (rest, 0.0)):
        if members:
            yield {"params": members, "weight_decay": decay}


def _momentum(training: TrainingSpec, default: float) -> float:
    return default if training.momentum is None else training.momentum


def describe_groups(optimizers: Iterable[Optimizer]) -> list[dict[str, str | float | int]]:
    """Return the settings and sizes of each parameter group, in plain values."""
    return [
        {
            "optimizer": type(optimizer).__name__,
            "lr": float(group.get("initial_lr", group["lr"])),
            "weight_decay": group["weight_decay"],
            "tensors": len(group["params"]),
            "parameters": sum(p.numel() for p in group["params"]),
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def clip_gradients(model: nn.Module, max_norm: float | None, norm: Tensor) -> None:
    """Scale all gradients, whose common norm is `norm`, to one of at most `max_norm`."""
    if max_norm is not None:
        parameters = [p for p in model.parameters() if p.grad is not None]
        for part in by_mesh(parameters):
            nn.utils.clip_grads_with_norm_(part, max_norm, norm)


def time_optimizers(optimizers: Iterable[Optimizer], timer: ComputeTimer) -> None:
    """Time the computation of optimizers, except for those in whose steps ranks wait for each other."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Muon | Adafactor):
            optimizer.register_step_pre_hook(lambda *_: timer.start())
            optimizer.register_step_post_hook(lambda *_: timer.stop())
