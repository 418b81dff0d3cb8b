"""Bytes of activations and FLOPs of a call of own code, counted on tensors without values."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from train_loop.code.load import OwnCode
from train_loop.code.use import own_code
from train_loop.loop.objectives.own_loss import call_batch, call_loss
from train_loop.model.build import DTYPES
from train_loop.model.families.choose import family_of
from train_loop.model.freeze import freeze
from train_loop.parallel.layers import apply_checkpointing
from train_loop.parallel.units import repeated_layers, wrapped_layers
from train_loop.plan import CallSizes
from train_loop.preflight.fork_server import lacks_memory
from train_loop.preflight.own_calls import cast_inputs, first_batch
from train_loop.preflight.own_code import first_rows_of
from train_loop.spec import JobSpec

CPU = torch.device("cpu")


def measure_call(spec: JobSpec) -> CallSizes:
    """Return the bytes and FLOPs of a micro-batch of a spec's first rows, or why they cannot be counted."""
    assert spec.code is not None, "only specs with code are measured"
    rows = spec.training.per_device_train_batch_size
    try:
        code, columns = own_code(spec.code), first_batch(first_rows_of(spec), spec)
        # Operators of other attention are not counted.
        counter, attention = FlopCounterMode(display=False), sdpa_kernel(SDPBackend.MATH)
        with _fake_call(spec, code, columns, recompute=False) as call, counter, attention:
            torch.autograd.backward(call_loss(code, call.model, call.batch).total)
        with _fake_call(spec, code, columns, recompute=True) as call, LiveBytes(call) as live:
            torch.autograd.backward(call_loss(code, call.model, call.batch).total)
    except Exception as error:  # the code's errors have no common class, in backward either
        if lacks_memory(error):
            raise
        return CallSizes(rows, problem=" ".join(str(error).split()).removesuffix("; correct the code")[:300])
    inputs = sum(value.nbytes for value in tree_leaves(call.batch) if isinstance(value, Tensor))
    activations, gradients = live.peak()
    return CallSizes(rows, activations + inputs, gradients, counter.get_total_flops())


class FakeCall(NamedTuple):
    """A model, its FSDP units below the root, and a batch, all without values."""

    model: nn.Module
    units: list[nn.Module]
    batch: Mapping[str, Any]


@contextlib.contextmanager
def _fake_call(spec: JobSpec, code: OwnCode, columns: Mapping[str, Any], *, recompute: bool) -> Iterator[FakeCall]:
    """Yield the model in its compute dtype and a batch, for use within the context."""
    anatomy = family_of(spec).build(spec.model)
    layers, units = (find(anatomy, spec.strategy.wrap_policy) for find in (repeated_layers, wrapped_layers))
    freeze(anatomy.model, spec.model.freeze_module_prefix)
    batch = call_batch(code, columns, CPU)
    with FakeTensorMode() as fake:
        model, dtype = anatomy.model, DTYPES[spec.model.dtype]
        _allocate(model, dtype)
        model.register_forward_pre_hook(cast_inputs(dtype), with_kwargs=True)
        if recompute and spec.model.gradient_checkpointing != "none":
            apply_checkpointing(layers, offload=False, pin_memory=False)
        yield FakeCall(model, units, tree_map_only(Tensor, fake.from_tensor, batch))


def _allocate(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the tensors of a model on meta by such of the current mode, with float parameters in the given dtype.

    Tied ones stay one.
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


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the bytes of living tensors of a call.

    Parameters do not count. Gradients of FSDP's root unit live until the end of backward, and count apart; those of
    other units are reduced before, and do not count.
    """

    def __init__(self, call: FakeCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = weakref.WeakKeyDictionary[Any, int]()
        """Number of each living storage."""
        self._changes = list[tuple[int, int]]()
        """Numbers of storages with the bytes that begin or end, by time."""
        self._gradients, self._root = set[int](), set[int]()
        self._in_units = {id(parameter) for unit in call.units for parameter in unit.parameters()}
        for number, parameter in enumerate(call.model.parameters()):
            self._numbers[parameter.untyped_storage()] = -1 - number
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._sort)  # type: ignore[no-untyped-call]

    def peak(self) -> tuple[int, int]:
        """Return the bytes of activations and of the root's gradients when both together are largest."""
        activations = gradients = 0
        found = 0, 0
        for number, size in self._changes:
            if number in self._root:
                gradients += size
            elif number not in self._gradients:
                activations += size
            found = max(found, (activations, gradients), key=sum)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        if storage not in self._numbers:
            number, size = len(self._changes), storage.nbytes()
            self._numbers[storage] = number
            self._changes.append((number, size))
            weakref.finalize(storage, self._changes.append, (number, -size))

    def _sort(self, parameter: Tensor) -> None:
        """Note whose gradient has been computed, and free those that FSDP reduces."""
        assert parameter.grad is not None
        in_unit = id(parameter) in self._in_units
        (self._gradients if in_unit else self._root).add(self._numbers.get(parameter.grad.untyped_storage(), -1))
        if in_unit:
            parameter.grad = None
