"""Agreement of ranks on the FSDP units that users' modules call, and on the parameters that they use.

FSDP2 pairs the collectives of ranks by their order alone. If ranks call different units, each computes with weights of
another one, without an error. If ranks use different parameters of a unit, gradients of the absent ones must be zero.
"""

import zlib
from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from train_loop.errors import ModelError, UserError
from train_loop.parallel.mesh import Mesh


class UnitCalls:
    """The units that a module calls in a step, and the parameters that have a gradient.

    `once` is for runs of any size, whose sums need one call of each unit in every micro-batch.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, once: bool) -> None:
        assert isinstance(model, FSDPModule), "parallelize makes every model an FSDP unit"
        if mesh.plan.world > 1 or once:
            _reduce_unused(model)
        self._mesh, self._once = mesh, once
        units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names, self._parameters = tuple(units), tuple(named.values())
        self._own = _owned(units, list(named))
        self._watched, self._steps = set[int](), 0
        self._calls, self._before = Counter[int](), Counter[int]()
        self._used, self._touched, self._order = set[int](), set[int](), 0
        for number, name in enumerate(units):
            # Registered after FSDP2's, which has gathered the unit's parameters then.
            unit = model.get_submodule(name)
            unit.register_forward_pre_hook(partial(self._before_gather, number), prepend=True)
            unit.register_forward_pre_hook(partial(self._called, number, name))

    def begin_step(self) -> None:
        """Forget the calls of a step that did not end, and those of evaluations."""
        self._forget()
        self._steps += 1

    def end_forward(self) -> None:
        """Raise ModelError, on all ranks, if others call further units. A collective call in the first steps."""
        self._agree_on(len(self._names))

    def end_micro_batch(self, *, stands_in: bool) -> None:
        """Note the gradients of a micro-batch, unless it stands in for padding.

        Raises ModelError if a run of any size has not called each unit once.
        """
        if not stands_in:
            self._used |= self._touched
        self._touched.clear()
        calls = [self._calls[number] - self._before[number] for number in range(len(self._names))]
        self._before = Counter(self._calls)
        if self._once and set(calls) != {1}:
            worst = next(number for number, count in enumerate(calls) if count != 1)
            raise ModelError(
                f"{self._shown(worst)} was called {calls[worst]} times in one forward pass, and "
                f"reproducible=any_size needs one call of each FSDP unit; {REMEDY_OF_CALLS}"
            )

    def agree(self) -> None:
        """Raise ModelError, on all ranks, if ranks have called different units. A collective call.

        Parameters without a gradient on any rank are then without one, as in a loop without FSDP: optimizers skip them.
        """
        counts = [self._calls[number] for number in range(len(self._names))]
        own = torch.tensor([*counts, self._order], dtype=torch.int64)
        used = torch.tensor([number in self._used for number in range(len(self._parameters))], dtype=torch.int64)
        table = torch.cat([own, -own, used]).to(self._mesh.device)
        dist.all_reduce(table, dist.ReduceOp.MAX)
        most, least, used = torch.split(table.cpu(), [len(own), len(own), len(used)])
        self._forget()
        self._check(most, -least)
        for parameter, is_used in zip(self._parameters, used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None

    def _check(self, most: Tensor, least: Tensor) -> None:
        if torch.equal(most, least):
            return
        number = int((most != least).nonzero()[0])
        if number == len(self._names):
            found = "ranks called the FSDP units of the module in different orders in one step"
        else:
            found = f"ranks called {self._shown(number)} {int(least[number])} to {int(most[number])} times in one step"
        raise ModelError(
            f"{found}: FSDP gathers a unit on all ranks together, so all must make the same calls; {REMEDY_OF_CALLS}"
        )

    def _before_gather(self, number: int, unit: nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled():
            self._agree_on(number)

    def _agree_on(self, number: int) -> None:
        """Compare the next call with that of other ranks, in the first steps: later, that would cost too much.

        Ranks that call different numbers of units would wait for each other without end.
        """
        if self._steps > _COMPARED_STEPS or self._mesh.plan.world == 1:
            return
        table = torch.tensor([number, -number], device=self._mesh.device)
        dist.all_reduce(table, dist.ReduceOp.MAX)
        most, least = int(table[0]), -int(table[1])
        if most != least:
            raise ModelError(
                f"one rank called {self._shown(least)} while another called {self._shown(most)}: FSDP gathers a unit "
                f"on all ranks together, so all must make the same calls; {REMEDY_OF_CALLS}"
            )

    def _shown(self, number: int) -> str:
        if number == len(self._names):
            return "no further layer"
        return f"the layer {self._names[number]}" if self._names[number] else "the model"

    def _called(self, number: int, name: str, unit: nn.Module, inputs: object) -> None:
        self._calls[number] += 1
        self._order = zlib.crc32(number.to_bytes(4, "little"), self._order)
        if number not in self._watched and torch.is_grad_enabled():
            self._watched.add(number)
            for place, leaf in self._own[name]:
                # FSDP2 keeps this tensor and its hooks for all later calls.
                parameter: Any = unit.get_parameter(leaf)
                parameter.register_post_accumulate_grad_hook(partial(self._has_gradient, place))

    def _has_gradient(self, place: int, parameter: Tensor) -> None:
        self._touched.add(place)

    def _forget(self) -> None:
        self._calls, self._before = Counter[int](), Counter[int]()
        self._used, self._touched, self._order = set[int](), set[int](), 0


_COMPARED_STEPS = 3
"""Steps in which ranks compare each call before it; later ones are compared when they end."""


def _reduce_unused(model: FSDPModule) -> None:
    """Make FSDP2 sum zeros for parameters without a gradient. Raises UserError for a version of torch without that."""
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        raise UserError(
            f"own code (code) on several workers is not supported by torch {torch.__version__}; install torch 2.13, or "
            "set num_workers: 1"
        )
    model.set_reduce_scatter_unused_params(True)


REMEDY_OF_CALLS = (
    "call each layer in every forward pass, and multiply its output by 0 to skip it; or make the model one unit, by "
    "strategy.wrap_policy or without _no_split_modules"
)


def _owned(units: dict[str, FSDPModule], parameters: list[str]) -> dict[str, list[tuple[int, str]]]:
    """Return by unit the numbers of its parameters and their names in it; the innermost unit owns a parameter."""
    owned: dict[str, list[tuple[int, str]]] = {name: [] for name in units}
    for number, parameter in enumerate(parameters):
        prefixes = [name for name in units if not name or parameter.startswith(f"{name}.")]
        unit = max(prefixes, key=len)
        owned[unit].append((number, parameter[len(unit) + 1 :] if unit else parameter))
    return owned
