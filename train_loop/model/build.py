"""Allocation of built models, with random weights that are the same at every world size."""

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.lora.base import DrawnWeights
from train_loop.model.lora.names import by_plain_name
from train_loop.model.parts import own_parts
from train_loop.model.quantize import quantized_layers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_FEW_ELEMENTS = 2**20
"""Maximum elements of a module that is initialised before a run: a larger one takes memory and seconds."""

_BYTE = 0xAA
"""Byte of an unset boolean, which is neither False nor True."""


def materialise(
    model: nn.Module, blueprint: Anatomy, *, seed: int, device: torch.device, drawn: DrawnWeights | None = None
) -> None:
    """Allocate a sharded model with random weights; `blueprint` is the same model on meta, before sharding."""
    allocate(model, blueprint, device=device)
    draw_weights(model, blueprint, dict(blueprint.model.named_parameters()), seed=seed, drawn=drawn)


def allocate(model: nn.Module, blueprint: Anatomy, *, device: torch.device, stored: Collection[str] = ()) -> None:
    """Allocate a sharded model and initialise its buffers by the model's own rules; its weights stay uninitialised.

    `stored` names the buffers that a folder holds. Raises ModelError for another buffer that no rule initialises.
    """
    model.to_empty(device=device)
    blueprint.family.tie(model, blueprint.model)
    buffers = by_plain_name(model, model.named_buffers(remove_duplicate=False))
    for name, module in blueprint.model.named_modules():
        own = [leaf for leaf, _ in module.named_buffers(recurse=False) if _join(name, leaf) not in stored]
        if own:
            with _initialised(blueprint, name, seed=name):
                for leaf in own:
                    buffers[_join(name, leaf)].copy_(_set_by_a_rule(blueprint, name, leaf))


def draw_weights(
    model: nn.Module,
    blueprint: Anatomy,
    names: Collection[str],
    *,
    seed: int,
    drawn: DrawnWeights | None = None,
) -> None:
    """Initialise the named parameters with random values by the model's own rules; `drawn` gets whole ones.

    Each module's full weights come from (seed, module name), and every rank keeps its slice. The weights therefore do
    not depend on the mesh, and the memory cost is the largest single module. Raises ModelError for a parameter that no
    rule initialises.
    """
    parameters = by_plain_name(model, model.named_parameters(remove_duplicate=False))
    quantized = quantized_layers(model)
    for name, value in drawn_weights(blueprint, names, seed=seed):
        if drawn is not None:
            drawn.add(name, value)
        layer = quantized.get(name)
        with nullcontext(parameters[name]) if layer is None else layer.writable() as target:
            for own, box in own_parts(target):
                own.copy_(value[box])


def drawn_weights(blueprint: Anatomy, names: Collection[str], *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the random values of the named parameters, by the rule of `draw_weights`, with their names."""
    for name, module in blueprint.model.named_modules():
        leaves = [leaf for leaf, _ in module.named_parameters(recurse=False) if _join(name, leaf) in names]
        if leaves:
            with _initialised(blueprint, name, seed=f"{seed}/{name}"):
                for leaf in leaves:
                    yield _join(name, leaf), _set_by_a_rule(blueprint, name, leaf)


def is_random(blueprint: Anatomy, name: str) -> bool:
    """Return whether the first value of a parameter depends on the seed; True for those of large modules."""
    module = blueprint.model.get_submodule(name.rpartition(".")[0])
    if sum(tensor.numel() for tensor in module.parameters(recurse=False)) > _FEW_ELEMENTS:
        return True
    (_, one), (_, other) = (next(drawn_weights(blueprint, [name], seed=seed)) for seed in (0, 1))
    return not torch.equal(one, other)


def check_rules(blueprint: Anatomy, stored: Collection[str] = ()) -> None:
    """Raise ModelError for a parameter or buffer of a model on meta that no rule initialises, before the run.

    `stored` names the tensors that a folder holds. Checks the first of several modules of a kind in each child of the
    model, and leaves large modules to the run.
    """
    checked = set[tuple[object, ...]]()
    for name, module in blueprint.model.named_modules():
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        leaves = [leaf for leaf in own if _join(name, leaf) not in stored]
        alike = (name.partition(".")[0], type(module), *leaves)
        if not leaves or alike in checked or sum(tensor.numel() for tensor in own.values()) > _FEW_ELEMENTS:
            continue
        checked.add(alike)
        with _initialised(blueprint, name, seed=name):
            for leaf in leaves:
                _set_by_a_rule(blueprint, name, leaf)


@contextmanager
def _initialised(blueprint: Anatomy, name: str, *, seed: str) -> Iterator[None]:
    """Fill one module of a model on meta within the context, with tensors that its family's rules initialise."""
    module = blueprint.model.get_submodule(name)
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    real = {leaf: _unset_like(t) for leaf, t in (parameters | buffers).items() if t is not None}
    module._parameters.update({leaf: _parameter(real[leaf]) for leaf in parameters.keys() & real.keys()})
    module._buffers.update({leaf: real[leaf] for leaf in buffers.keys() & real.keys()})
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little", signed=True))
            blueprint.family.initialise(blueprint.model, name)
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


def _parameter(tensor: Tensor) -> nn.Parameter:
    # torch refuses gradients of integers.
    return nn.Parameter(tensor, requires_grad=_has_nan(tensor))


def _set_by_a_rule(blueprint: Anatomy, name: str, leaf: str) -> Tensor:
    """Return an initialised parameter or buffer of a module. Raises ModelError if no rule has set all of it."""
    module = blueprint.model.get_submodule(name)
    tensor: Tensor = getattr(module, leaf).detach()
    if _is_unset(tensor):
        raise ModelError(
            f"{blueprint.family.source} does not initialise {_join(name, leaf)} ({type(module).__name__}), so its "
            f"values would be random memory; {blueprint.family.remedy_for_unset}"
        )
    return tensor


def _unset_like(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same shape and dtype with values that no initialisation gives: NaN in floats."""
    empty = torch.empty_like(tensor, device="cpu")
    if empty.dtype == torch.bool:
        empty.view(torch.uint8).fill_(_BYTE)
        return empty
    return empty.fill_(float("nan") if _has_nan(empty) else torch.iinfo(empty.dtype).min)


def _is_unset(tensor: Tensor) -> bool:
    """Return whether any element of a tensor from `_unset_like` is still unset."""
    if tensor.dtype == torch.bool:
        return bool((tensor.contiguous().view(torch.uint8) == _BYTE).any())
    return bool((tensor.isnan() if _has_nan(tensor) else tensor == torch.iinfo(tensor.dtype).min).any())


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _join(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf
