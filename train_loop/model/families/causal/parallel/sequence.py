"""Sequence parallelism of ranks that share layers: between projections, each of them has a part of the tokens.

Norms and the residual stream see a part. Attention and MLPs gather all tokens; the sum over ranks of their output is
scattered (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).

Shapes: B batch, T tokens, P ranks that share layers, H size of a state, F width of attention or an MLP.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import is_norm
from train_loop.model.families.causal.build import layers_of
from train_loop.model.families.causal.parallel.token_parts import Change, GatheredInput, Parts, exchange

_COLUMNS, _ROWS = "colwise", "rowwise"
_WHOLE = {"colwise_gather_output", "rowwise_split_input"}
"""Styles of projections that exchange wide tensors themselves, and give each rank whole gradients of its input."""
_STATES = "hidden_states"
"""Name of the first argument of layers and attention."""


class Regions(NamedTuple):
    """The modules of a model in which ranks have all tokens, and those between them; all by name."""

    layers: tuple[str, ...]
    ends: Mapping[str, str]
    """Modules whose output is gathered, by the first layer of their stack: the norm that follows, or the last layer."""
    inner: Mapping[str, bool]
    """Attention and MLPs, which see all tokens; true if the gradients of their inputs are parts of a sum."""

    def has_part(self, name: str) -> bool:
        """Return whether a module sees a part of the tokens, so that its gradients are parts of a sum."""
        return _is_inside(name, (*self.layers, *self.ends.values())) and not _is_inside(name, self.inner)

    def projections(self, plan: Mapping[str, str]) -> dict[str, str]:
        """Return the style of each projection of an inner module whose gradients are parts, by name."""
        chosen = (_COLUMNS, _ROWS)
        return {name: style for name, style in plan.items() if style in chosen and self.inner.get(_holder(name))}


def find_regions(model: Any, plan: Mapping[str, str], attention: Iterable[str]) -> Regions:
    """Return the regions of a model by its expanded plan; `attention` names its attention modules."""
    modules = dict(model.named_modules())
    repeated = set(layers_of(model))
    layers = tuple(name for name, module in modules.items() if module in repeated)
    holders = {_holder(name) for name, style in plan.items() if style == _ROWS or style in _WHOLE}
    # Attention of another kind, such as linear attention, has the same name in other layers.
    named = {_leaf(name) for name in attention}
    mixing = {name for name in modules if _leaf(name) in named}
    # The plan names the head and each parameter, too.
    inner = [name for name in {*holders, *mixing} if _is_inside(name, layers) and any(modules[name].children())]
    stacks = [list(own) for _, own in groupby(layers, _holder)]

    def sums(name: str) -> bool:
        own = {one: style for one, style in plan.items() if _is_inside(one, (name,))}
        split = [modules[one] for one, style in own.items() if style in (_COLUMNS, _ROWS) and one in modules]
        are_linear = all(isinstance(one, nn.Linear) for one in split)
        return _ROWS in own.values() and are_linear and _WHOLE.isdisjoint(own.values())

    ends = {own[0]: _end(model, own[-1]) for own in stacks}
    return Regions(layers, ends, {name: sums(name) for name in sorted(inner)})


def _end(model: nn.Module, last: str) -> str:
    """Return the norm that follows a stack of layers, or its last layer."""
    stack, holder = _holder(last), _holder(_holder(last))
    children = [(f"{holder}.{leaf}".lstrip("."), child) for leaf, child in model.get_submodule(holder).named_children()]
    place = [name for name, _ in children].index(stack)
    norms = [name for name, child in children[place + 1 :] if is_norm(child)]
    return norms[0] if len(norms) == 1 else last


def _holder(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{one}.") for one in modules)


class SplitStates:
    """A model whose layers compute with a part of the tokens, and the exchanges of its current or last forward pass.

    Gradients of states are whole outside of the layers, and in them those of a rank's own tokens.
    """

    def __init__(self, model: nn.Module, plan: Mapping[str, str], attention: Iterable[str], parts: Parts) -> None:
        self._regions = regions = find_regions(model, plan, attention)
        self._parts, self._length = parts, 0
        self._input: tuple[GatheredInput, Tensor] | None = None
        """Input of the attention or MLP that computes, and the part that it was gathered from."""
        self._gathered = set[str]()
        for name in regions.layers:
            # A hook is outside of recomputation, which then keeps the part.
            hook = self._begin if name in regions.ends else self._check_part
            model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
        for name in regions.ends.values():
            model.get_submodule(name).register_forward_hook(partial(self._finish, name))
        for name, sums in regions.inner.items():
            module = model.get_submodule(name)
            module.forward = partial(self._with_all_tokens, name, sums, module.forward)
        for name, style in regions.projections(plan).items():
            module = model.get_submodule(name)
            module.forward = partial(self._columns if style == _COLUMNS else self._rows, module)

    def watch(self, model: nn.Module) -> None:
        """Check from now on that each forward pass of the model splits its states, and gathers them where it must."""
        model.register_forward_pre_hook(self._forget)
        model.register_forward_hook(self._check)

    def _forget(self, *_: Any) -> None:
        self._length = 0
        self._gathered.clear()

    def _check(self, model: nn.Module, inputs: Any, output: Any) -> None:
        missing = sorted({*self._regions.inner, *self._regions.ends.values()} - self._gathered)
        if missing or not self._length:
            name = missing[0] if missing else self._regions.layers[0]
            raise ModelError(
                f"sequence_parallel is not active in all layers of {type(model).__name__.removeprefix('FSDP')}: "
                f"{name} exchanged no states between the ranks that share it; choose sequence_parallel: false"
            )

    def _begin(self, layer: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
        """Take this rank's part of the states [B, T, H] of the first layer of a stack."""

        def split(states: Tensor) -> Tensor:
            self._length = states.shape[-2]
            return exchange(states, self._parts.own, self._parts.gather)

        return _changed(split, inputs, named)

    def _check_part(self, layer: nn.Module, inputs: Any, named: Any) -> None:
        """Raise ModelError if a later layer sees other tokens than a part."""
        states: Tensor = inputs[0] if inputs else named[_STATES]
        if states.shape[-2] * self._parts.ranks != self._length:
            raise ModelError(
                f"sequence_parallel: {type(layer).__name__.removeprefix('FSDP')} has states of {states.shape[-2]} "
                f"tokens instead of a part of {self._length}; choose sequence_parallel: false"
            )

    def _finish(self, name: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Gather all tokens after a stack of layers; what follows computes the same on each rank."""
        self._gathered.add(name)
        return _first_changed(lambda states: exchange(states, self._parts.gather, self._parts.own), output)

    def _with_all_tokens(self, name: str, sums: bool, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """Call attention or an MLP with all tokens; its output is a part again."""
        self._gathered.add(name)
        parts = self._parts

        def gathered(part: Tensor) -> Tensor:
            self._input = GatheredInput(parts.gather), part
            return exchange(part, parts.gather, parts.sum if sums else parts.own)

        inputs, named = _changed(gathered, inputs, named)
        try:
            output = forward(*inputs, **named)
        finally:  # recomputation ends by an exception as soon as it has all tensors
            self._input = None
        if sums:  # its last projection has scattered the sum
            return output
        return _first_changed(lambda states: exchange(states, parts.own, parts.gather), output)

    def _columns(self, projection: nn.Module, states: Tensor) -> Tensor:
        """Compute this rank's outputs of a column-wise projection, [..., T, H] → [..., T, F/P]."""
        assert self._input is not None, "attention or the MLP has gathered the states"
        gathered, part = self._input
        return gathered.project(states, part, *map(_own, (projection.weight, projection.bias)))

    def _rows(self, projection: nn.Module, wide: Tensor) -> Tensor:
        """Compute a row-wise projection, whose outputs are sums over ranks, [..., T, F/P] → [..., T/P, H].

        The bias is added to a part of the tokens.
        """
        states = exchange(F.linear(wide, _own(projection.weight)), self._parts.sum, self._parts.gather)
        bias: Any = projection.bias
        if bias is None:
            return states
        part: Tensor = bias.to_local(grad_placements=[Partial()]) if isinstance(bias, DTensor) else bias
        return states + part


def _own(parameter: Any) -> Any:
    """Return this rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _changed(change: Change, inputs: Any, named: Any) -> tuple[Any, Any]:
    """Return the arguments of a layer, attention or MLP with other states."""
    if inputs:
        return (change(inputs[0]), *inputs[1:]), named
    return inputs, {**named, _STATES: change(named[_STATES])}


def _first_changed(change: Change, output: Any) -> Any:
    """Return an output with other states, which are all of it or come first."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
