"""FSDP2's units of a model: sharding, prefetching, and timing of a rank's computation without its waits in them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.utils._pytree import tree_leaves, tree_map_only

from train_loop.errors import UserError
from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.precision import Precision, find_precision
from train_loop.model.whole import whole_parameters
from train_loop.parallel.mesh import Mesh
from train_loop.parallel.units import are_outside_layers, find_units, join_units
from train_loop.spec import StrategySpec
from train_loop.spec.model import Dtype
from train_loop.telemetry.timers import ComputeTimer


def apply_fsdp(anatomy: Anatomy, mesh: Mesh, strategy: StrategySpec, *, router_dtype: Dtype | None = None) -> None:
    """Shard each unit, then the rest as the root unit; gradients are plain sums over all ranks.

    Routers in another dtype than the rest are separate units, and so are experts that ranks share.
    """
    offload, outside = _offload_policy(strategy, mesh), are_outside_layers(strategy)
    # Found by class name, before FSDP2 changes the names of norms, which may be units themselves.
    units, experts = find_units(anatomy, strategy.wrap_policy), anatomy.experts
    precision = find_precision(anatomy, strategy)
    wholes = _Wholes(anatomy.model, mesh, strategy.ignored_params)
    units = join_units(anatomy, units, precision)
    policy = MixedPrecisionPolicy(
        DTYPES[strategy.param_dtype],
        DTYPES[strategy.reduce_dtype],
        cast_forward_inputs=strategy.cast_forward_inputs,
    )

    def shard(unit: list[nn.Module], mixed: MixedPrecisionPolicy) -> None:
        for one in unit:
            if one in precision.units and one is not anatomy.head:
                # The module around it computes in this dtype. The output of the head keeps its own.
                one.forward = partial(_in_dtype, DTYPES[precision.around[one]], one.forward)
            one.forward = partial(_without_views, one.forward)
        # A single module is passed alone: a list would stay gathered until the last of its modules has run.
        module = unit if len(unit) > 1 else unit[0]
        ranks, reshard = _ranks_of(unit[0], anatomy, mesh), strategy.reshard_after_forward
        if outside and reshard is None and unit == [anatomy.head]:
            # Backward begins with the head.
            reshard = False
        place = wholes.place if wholes.are_in(unit) else None
        fully_shard(
            module,
            mesh=ranks,
            mp_policy=mixed,
            offload_policy=offload,
            reshard_after_forward=reshard,
            shard_placement_fn=place,
        )
        if outside and unit == [anatomy.embeddings] and isinstance(unit[0], nn.Embedding):
            # The gradient of a lookup does not need the table.
            sharded: Any = unit[0]
            sharded.set_unshard_in_backward(False)

    if experts is not None and mesh.experts is not None:
        units = [[module] for module in experts.modules] + units
    for module, precise in _precise_units(anatomy, strategy, precision, router_dtype):
        shard([module], precise)
    for unit in units:
        if not isinstance(unit[0], FSDPModule):
            # An input of experts is the output of their router, which keeps its dtype.
            casts = policy.cast_forward_inputs and (experts is None or unit[0] not in experts.modules)
            casts |= unit[0] in precision.units
            own = replace(policy, param_dtype=DTYPES[precision.dtypes[unit[0]]], cast_forward_inputs=casts)
            shard(unit, own)
    shard([anatomy.model], replace(policy, output_dtype=strategy.output_dtype and DTYPES[strategy.output_dtype]))
    for module in anatomy.model.modules():
        # A single rank has nothing to sum, but would divide every gradient by the factor.
        if isinstance(module, FSDPModule) and mesh.plan.world > 1:
            _sum_gradients(module)


def _precise_units(
    anatomy: Anatomy, strategy: StrategySpec, precision: Precision, router_dtype: Dtype | None
) -> Iterator[tuple[nn.Module, MixedPrecisionPolicy]]:
    """Yield norms and routers in another dtype than the rest, which are separate units."""
    reduced = DTYPES[strategy.reduce_dtype]
    for norm in anatomy.norms if strategy.norm_dtype is not None else ():
        if norm not in precision.named:
            around, own = DTYPES[precision.around[norm]], strategy.norm_dtype and DTYPES[strategy.norm_dtype]
            yield norm, MixedPrecisionPolicy(own, reduced, output_dtype=around, cast_forward_inputs=False)
    if anatomy.experts is not None and router_dtype is not None and router_dtype != strategy.param_dtype:
        for router in anatomy.experts.routers:
            # Their output keeps this dtype: the model multiplies the results of experts by it. Their input has the
            # dtype of the layer, whatever cast_forward_inputs is.
            yield router, MixedPrecisionPolicy(DTYPES[router_dtype], reduced)


def _offload_policy(strategy: StrategySpec, mesh: Mesh) -> OffloadPolicy:
    pin = strategy.pin_memory and mesh.device.type == "cuda"
    return CPUOffloadPolicy(pin_memory=pin) if strategy.offload_policy is True else OffloadPolicy()


class _Wholes:
    """The parameters that each rank holds whole. FSDP2 sums their gradients as those of replicas.

    Parameters that FSDP2 ignores would neither be cast for computation nor summed.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, patterns: Sequence[str]) -> None:
        # Every rank of a mesh without shards holds all parameters whole.
        self._ids = whole_parameters(model, patterns)
        self._info = (
            None
            if mesh.wholes is None
            else _fsdp_common.HSDPMeshInfo(mesh.wholes, shard_mesh_dim=1, replicate_mesh_dim=0)
        )
        if self._info is not None and not hasattr(_fsdp_common, "ShardPlacementResult"):
            raise UserError(
                f"ignored_params is not supported by torch {torch.__version__}; install torch 2.13, or remove it"
            )

    def are_in(self, unit: Sequence[nn.Module]) -> bool:
        """Return whether a module of a unit has such parameters."""
        return self._info is not None and any(id(p) in self._ids for one in unit for p in one.parameters())

    def place(self, parameter: nn.Parameter) -> Any:
        """Return where a parameter is sharded, as FSDP2 wants it; None for the mesh of its unit."""
        if id(parameter) not in self._ids or self._info is None:
            return None
        return _fsdp_common.ShardPlacementResult(None, self._info)


def _ranks_of(unit: nn.Module, anatomy: Anatomy, mesh: Mesh) -> DeviceMesh:
    """Return the ranks that shard a unit: shared experts have another mesh."""
    if mesh.experts is None or anatomy.experts is None or unit not in anatomy.experts.modules:
        return mesh.fsdp
    return mesh.experts.efsdp


def _sum_gradients(unit: FSDPModule) -> None:
    unit.set_gradient_divide_factor(1.0)
    # A factor selects PREMUL_SUM, which gloo rejects and NCCL zeroes in bf16 (pytorch#190747).
    unit.set_force_sum_reduction_for_comms(True)


def _in_dtype(dtype: torch.dtype, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Return a unit's output with its floating-point tensors in a dtype."""
    output = forward(*inputs, **named)
    return tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, output)


def _without_views(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Return a unit's output without views of other tensors.

    FSDP2 gathers the unit for backward by a hook on its output. If that is a view, such as the logits of a head with a
    bias, an operation in place would lose the hook: gradients could then be wrong.
    """
    output = forward(*inputs, **named)
    if not any(map(_is_view, tree_leaves(output))):
        return output
    return tree_map_only(Tensor, lambda one: _NoView.apply(one) if _is_view(one) else one, output)  # type: ignore[no-untyped-call]


def _is_view(one: Any) -> bool:
    return isinstance(one, Tensor) and one.requires_grad and one._is_view()


class _NoView(torch.autograd.Function):
    """The same values in the same memory, as a tensor that autograd does not count as a view."""

    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def apply_prefetch(
    layers: Sequence[nn.Module], *, forward: int, backward: int, experts: Collection[nn.Module] = ()
) -> None:
    """Make each layer prefetch the next `forward` layers, and in backward the previous `backward` layers.

    A value of 1 leaves prefetching to FSDP, which gathers one layer ahead in the order that it has seen. The root is
    not changed. `experts` are units inside of layers, which both passes gather after their layer, at least one ahead.
    """
    groups = [(layer, *(one for one in layer.modules() if one in experts)) for layer in layers]
    orders = (
        (groups, forward, FSDPModule.set_modules_to_forward_prefetch),
        (groups[::-1], backward, FSDPModule.set_modules_to_backward_prefetch),
    )
    for ordered, number, prefetch in orders:
        units = list[FSDPModule](unit for group in ordered for unit in group if isinstance(unit, FSDPModule))
        for place, unit in enumerate(units if number > 1 or experts else []):
            prefetch(unit, units[place + 1 : place + 1 + number])


def begin_gather(anatomy: Anatomy) -> None:
    """Begin to gather the units that the next forward pass needs first, while its inputs are made."""
    for unit in _first_units(anatomy):
        unit.unshard(async_op=True)


def end_gather(anatomy: Anatomy) -> None:
    """Wait for gathers that no forward pass will use: FSDP2 would take their values for those of a later pass."""
    for unit in _first_units(anatomy):
        unit.unshard()


def _first_units(anatomy: Anatomy) -> list[FSDPModule]:
    parts: tuple[Any, ...] = anatomy.model, anatomy.embeddings
    return [one for one in parts if isinstance(one, FSDPModule)]


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the device on which the model computes, wherever its parameters are."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def time_units(model: nn.Module, timer: ComputeTimer) -> None:
    """Stop the timer while units gather parameters or reduce gradients, in every training pass.

    Call it after FSDP2 has made the units: FSDP2's hooks then run between the first and last hooks registered here.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _UnitHooks(module, timer)
    # FSDP2 reduces the root's gradients at the end of a pass, which has no hook.
    model.register_forward_pre_hook(lambda *_: timer.drop(), prepend=True)


class _UnitHooks:
    """Hooks around FSDP2's work at the start of a unit's forward, and at the start and end of its backward."""

    def __init__(self, unit: nn.Module, timer: ComputeTimer) -> None:
        self._timer = timer
        self._output: Any = None
        unit.register_forward_pre_hook(self._before_gather, prepend=True, with_kwargs=True)
        unit.register_forward_pre_hook(self._after_gather, with_kwargs=True)
        unit.register_forward_hook(self._before_pre_backward, prepend=True)
        unit.register_forward_hook(self._after_pre_backward)

    # A tensor's gradient hooks run in the order of registration, and FSDP2 registers its own in between. FSDP2 passes
    # new input tensors to the unit, and reduces gradients after those of the new tensors.

    def _before_gather(self, unit: nn.Module, inputs: Any, named: Any) -> None:
        self._timer.stop()
        _at_gradient((inputs, named), self._timer.start)

    def _after_gather(self, unit: nn.Module, inputs: Any, named: Any) -> None:
        _at_gradient((inputs, named), self._timer.stop)
        if torch.is_grad_enabled():
            self._timer.start()

    def _before_pre_backward(self, unit: nn.Module, inputs: Any, output: Any) -> None:
        self._output = output
        _at_gradient(output, self._timer.stop)

    def _after_pre_backward(self, unit: nn.Module, inputs: Any, output: Any) -> None:
        # FSDP2 may have cast the output since, but its hook is on the original tensor.
        _at_gradient(self._output, self._timer.start)
        self._output = None


@contextmanager
def timing_exchanges(model: nn.Module, timer: ComputeTimer) -> Iterator[None]:
    """Stop the timer while ranks exchange what goes into linear layers and embeddings, what comes out, and gradients.

    Within the context, the layers are wrapped: what is inside then computes, and what the wrapper does is exchange.
    """
    plain = {one: one.forward for one in model.modules() if isinstance(one, nn.Linear | nn.Embedding)}
    inside = {one: partial(_computed, timer, forward) for one, forward in plain.items()}
    for one, forward in inside.items():
        one.forward = forward  # type: ignore[method-assign]
    yield
    for one, forward in inside.items():
        wrapped = one.forward is not forward
        one.forward = partial(_exchanged, timer, one.forward) if wrapped else plain[one]  # type: ignore[method-assign]


def _computed(timer: ComputeTimer, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Compute a layer, from which on the timer stops: its output is exchanged now, and its gradient in backward."""
    _at_gradient((inputs, named), timer.pause)
    output = forward(*inputs, **named)
    timer.pause()
    return output


def _exchanged(timer: ComputeTimer, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Compute a layer and its exchanges, from whose end on the timer runs again."""
    # Another part of the model may use the same tensor, whose own gradient is complete only after that part's.
    inputs, named = tree_map_only(Tensor, lambda one: one.view_as(one), (inputs, named))
    _at_gradient((inputs, named), timer.resume)
    try:
        return forward(*inputs, **named)
    finally:  # recomputation ends by an exception as soon as it has all tensors
        timer.resume()


def _at_gradient(values: Any, act: Callable[[], None]) -> None:
    """Call `act` when the gradient of the first tensor that requires one is computed."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda _: act())  # type: ignore[no-untyped-call]
            return
