"""Optimizers of a sharded model, and gradient clipping."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from train_loop.model.families.anatomy import Anatomy, Experts
from train_loop.model.roles import Role, roles_of
from train_loop.optim.adafactor import Adafactor
from train_loop.optim.by_mesh import ByMesh, by_mesh
from train_loop.optim.eight_bit import adamw_8bit_class
from train_loop.optim.groups import ParameterGroup, parameter_groups
from train_loop.optim.host_state import HostState
from train_loop.optim.lion import Lion
from train_loop.optim.muon import Muon
from train_loop.optim.schedule_free import ScheduleFreeAdamW
from train_loop.spec import SCHEDULE_FREE, TrainingSpec
from train_loop.telemetry.timers import ComputeTimer

Described = dict[str, str | float | int]
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

    Raises UserError if a package that it needs is not installed, and ModelError for groups that the model has not.
    """
    parts = _by_optimizer(anatomy, training).items()
    return tuple(_build(name, groups, training, anatomy.experts, place) for name, groups in parts)


def plan_groups(anatomy: Anatomy, training: TrainingSpec) -> list[Described]:
    """Return the parameter groups that a run of a model will have, as `describe_groups` returns them.

    The names of optimizers are those of a spec. Raises ModelError for groups that the model has not.
    """
    return [
        _described(name, _options(group, training, name), group.parameters)
        for name, groups in _by_optimizer(anatomy, training).items()
        for group in groups
    ]


def _by_optimizer(anatomy: Anatomy, training: TrainingSpec) -> dict[str, list[ParameterGroup]]:
    """Return the groups of each optimizer, by its name in a spec, without empty ones."""
    groups = parameter_groups(anatomy, training)
    if training.optimizer != "muon":
        return {training.optimizer: groups}
    matrices = muon_matrices(anatomy)
    rest = {id(p) for p in anatomy.model.parameters()} - matrices
    parts = {"muon": [one.only(matrices) for one in groups], "adamw": [one.only(rest) for one in groups]}
    filled = {name: [group for group in part if group.parameters] for name, part in parts.items()}
    return {name: part for name, part in filled.items() if part}


def muon_matrices(anatomy: Anatomy) -> set[int]:
    """Return the ids of the parameters that muon updates, frozen or not: orthogonal updates are for linear maps."""
    return {one for one, role in roles_of(anatomy).items() if role == Role.MATRIX}


def _build(
    name: str, groups: Sequence[ParameterGroup], training: TrainingSpec, experts: Experts | None, place: Place
) -> Optimizer:
    parameters, lr = [p for group in groups for p in group.parameters], training.learning_rate
    own = [{"params": [*group.parameters], **_options(group, training, name)} for group in groups]
    if name == "sgd":
        # Set explicitly: torch's default for sharded tensors processes one at a time.
        return _class(SGD, parameters, place)(own, lr, momentum=_momentum(training, 0.9), foreach=True)
    if name == "adafactor":
        return Adafactor(own, lr)
    if name == "muon":
        both = {} if experts is None else experts.fused
        return _class(Muon, (), place)(
            own, lr, momentum=_momentum(training, 0.95), adjust_lr_fn="match_rms_adamw", fused=both
        )
    if name == "lion":
        return _class(Lion, (), place)(own, lr)
    if name == SCHEDULE_FREE:
        return _class(ScheduleFreeAdamW, (), place)(own, lr, eps=training.adam_epsilon)
    if name == "adamw_8bit":
        return adamw_8bit_class()(own, lr, eps=training.adam_epsilon)
    # On CPUs the bits of the fused step depend on how parameters are sharded; on GPUs they do not.
    fused = training.reproducible == "same_size" or all(p.is_cuda for p in parameters)
    kind: type[Adam] = {"adam": Adam, "adamw": AdamW}[name]
    return _class(kind, parameters, place)(own, lr, eps=training.adam_epsilon, fused=fused, foreach=not fused)


def _options(group: ParameterGroup, training: TrainingSpec, name: str) -> dict[str, Any]:
    """Return a group's settings as torch's optimizers take them."""
    found: dict[str, Any] = {"lr": group.lr, "weight_decay": group.weight_decay}
    if name not in ("sgd", "adafactor", "muon"):
        found["betas"] = group.betas or (training.adam_beta1, training.adam_beta2)
    return found if group.name is None else found | {"name": group.name}


def _class(kind: type[T], parameters: Iterable[Tensor], place: Place) -> type[T]:
    """Return a class of optimizers for a place of their state, and for lists of parameters on several meshes."""
    bases: list[type[Optimizer]] = [HostState] if place.on_host else []
    if len(by_mesh(parameters)) > 1:
        bases.append(ByMesh)
    values = {"pin_memory": place.pin_memory}
    return cast("type[T]", type(kind.__name__, (*bases, kind), values)) if bases else kind


def _momentum(training: TrainingSpec, default: float) -> float:
    return default if training.momentum is None else training.momentum


def describe_groups(optimizers: Iterable[Optimizer]) -> list[Described]:
    """Return the settings and sizes of each parameter group, in plain values."""
    return [
        _described(type(optimizer).__name__, group, group["params"])
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _described(optimizer: str, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> Described:
    named = {"name": group["name"]} if "name" in group else {}
    betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
    return {
        "optimizer": optimizer,
        **named,
        "lr": float(group.get("initial_lr", group["lr"])),
        "weight_decay": group["weight_decay"],
        **betas,
        "tensors": len(parameters),
        "parameters": sum(p.numel() for p in parameters),
    }


def clip_gradients(optimizers: Iterable[Optimizer], max_norm: float | None, norm: Tensor) -> None:
    """Scale the gradients of all optimizers, whose common norm is `norm`, to one of at most `max_norm`."""
    if max_norm is not None:
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        for part in by_mesh(parameters):
            nn.utils.clip_grads_with_norm_(part, max_norm, norm)


def time_optimizers(optimizers: Iterable[Optimizer], timer: ComputeTimer) -> None:
    """Time the computation of optimizers, except for those in whose steps ranks wait for each other."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Muon | Adafactor):
            optimizer.register_step_pre_hook(lambda *_: timer.start())
            optimizer.register_step_post_hook(lambda *_: timer.stop())
