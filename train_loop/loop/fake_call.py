"""Calls of a model with a batch, both without values, in which FLOPs and bytes can be counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from train_loop.code.use import own_code
from train_loop.data.dataset import Dataset
from train_loop.loop.objectives.own_loss import call_batch, call_loss, random_numbers_of, read_columns
from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.choose import family_of
from train_loop.model.freeze import freeze
from train_loop.model.lora.adapters import inject_adapters
from train_loop.parallel.layers import apply_checkpointing, apply_tiled_mlp, tiled_mlps
from train_loop.parallel.units import find_units, repeated_layers
from train_loop.spec import BudgetSpec, JobSpec


class FakeCall(NamedTuple):
    """A model, its FSDP units below the root, and a batch, all without values."""

    model: nn.Module
    units: list[nn.Module]
    batch: Any


@contextmanager
def fake_call(anatomy: Anatomy, spec: JobSpec, batch: Any, *, recompute: bool) -> Iterator[FakeCall]:
    """Yield a built model in its compute dtype and a batch, for use within the context. The model is changed."""
    model, dtype, policy = anatomy.model, DTYPES[spec.model.dtype], spec.strategy.wrap_policy
    layers, units = repeated_layers(anatomy, policy), [one for unit in find_units(anatomy, policy) for one in unit]
    freeze(model, spec.model.freeze_module_prefix)
    if spec.model.lora is not None:
        inject_adapters(anatomy, spec.model)
    with FakeTensorMode() as fake:
        _allocate(model, dtype)
        if spec.strategy.cast_forward_inputs:
            model.register_forward_pre_hook(cast_inputs(dtype), with_kwargs=True)
        if spec.strategy.apply_tiled_mlp:
            apply_tiled_mlp(tiled_mlps(anatomy, layers), tiles=spec.strategy.tiled_num_shards)
        how = spec.model.gradient_checkpointing
        if recompute and how != "none" and not isinstance(how, BudgetSpec):
            # Inputs of layers count apart.
            apply_checkpointing(layers, "full" if how == "offload" else how)
        yield FakeCall(model, units, tree_map_only(Tensor, fake.from_tensor, batch))


def count_flops_of_rows(spec: JobSpec, columns: dict[str, Any]) -> int:
    """Return the FLOPs of forward and backward of own code with some rows, recomputation not included."""
    assert spec.code is not None, "only specs with code have own rows"
    code = own_code(spec.code)
    # Operators of other attention are not counted.
    counter, attention = FlopCounterMode(display=False), sdpa_kernel(SDPBackend.MATH)
    batch = call_batch(code, columns, torch.device("cpu"))
    with fake_call(family_of(spec).build(spec.model), spec, batch, recompute=False) as call, counter, attention:
        torch.autograd.backward(call_loss(code, call.model, call.batch).total)
    return counter.get_total_flops()


def count_row_flops(spec: JobSpec, dataset: Dataset) -> int | None:
    """Return the FLOPs of a row, from a micro-batch of a run's first rows; None if the code needs values.

    The run's random number generators do not change.
    """
    rows = min(spec.training.micro_batch, dataset.samples)
    with random_numbers_of(0), suppress(Exception):  # the code's errors have no common class, in backward either
        return count_flops_of_rows(spec, read_columns(dataset, np.arange(rows), torch.device("cpu"))) // rows
    return None


def cast_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    """Return a hook that gives a model its inputs in the compute dtype, as FSDP2 does."""

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def hook(module: nn.Module, arguments: Any, named: Any) -> tuple[Any, Any]:
        return tree_map_only(Tensor, cast, arguments), tree_map_only(Tensor, cast, named)

    return hook


def _allocate(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the tensors of a model on meta with those of the current mode, with float parameters in the given dtype.

    Tied parameters stay tied.
    """
    made = dict[int, Tensor]()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    found = made.get(id(tensor))
                    tensors[name] = made[id(tensor)] = _like(tensor, dtype) if found is None else found  # type: ignore[assignment]


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    kind = dtype if is_parameter and tensor.is_floating_point() else tensor.dtype
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
