"""Calls of own code's loss before a job is stored: of its first rows on meta, which computes nothing.

If the loss needs values, it is called with single rows and a small model's weights instead.
"""

import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from train_loop.code.load import OwnCode
from train_loop.errors import ModelError
from train_loop.loop.fake_call import cast_inputs
from train_loop.loop.objectives.own_loss import call_batch, call_loss, unchanged_buffers
from train_loop.model.build import DTYPES, materialise
from train_loop.model.families.anatomy import Anatomy
from train_loop.parallel.unit_calls import REMEDY_OF_CALLS
from train_loop.parallel.units import find_units
from train_loop.preflight.process.fork_server import lacks_memory
from train_loop.preflight.unit_use import UnitUse
from train_loop.spec import JobSpec
from train_loop.state import seed_generators

CALLS = 8
"""Calls of the loss, each with other random numbers."""
_FEW_PARAMETERS = 2**24
_CPU_SECONDS = 5.0
"""Seconds after which no further row is tried."""
META = torch.device("meta")


def check_loss(code: OwnCode, anatomy: Anatomy, columns: Mapping[str, Any], spec: JobSpec) -> None:
    """Call the loss. Raises ModelError for its errors, and for calls of units that ranks could not make together."""
    built = copy.deepcopy(anatomy.model)
    calls = _Calls(code, anatomy, spec)
    try:
        batch = call_batch(code, first_batch(columns, spec), META)
        calls.check(batch for _ in range(CALLS))
    except ModelError as error:
        if not _needs_values(error.__cause__):
            raise
        if sum(parameter.numel() for parameter in built.parameters()) <= _FEW_PARAMETERS:
            _check_with_values(code, anatomy.family.anatomy(built), columns, spec)


def first_batch(columns: Mapping[str, Any], spec: JobSpec) -> dict[str, Any]:
    """Return the rows of the first micro-batch."""
    return {name: values[: spec.training.micro_batch] for name, values in columns.items()}


def _check_with_values(code: OwnCode, blueprint: Anatomy, columns: Mapping[str, Any], spec: JobSpec) -> None:
    model, cpu = copy.deepcopy(blueprint.model), torch.device("cpu")
    materialise(model, blueprint, seed=spec.training.seed, device=cpu)
    calls, end = _Calls(code, blueprint.family.anatomy(model), spec), time.process_time() + _CPU_SECONDS

    def batches() -> Iterator[Mapping[str, Any]]:
        for row in range(min(CALLS, *map(len, columns.values()))):
            if row and time.process_time() > end:
                return
            yield call_batch(code, {name: values[row : row + 1] for name, values in columns.items()}, cpu)

    try:
        calls.check(batches())
    except (ModelError, MemoryError, RuntimeError) as error:
        # Ranks may have more memory than this check.
        if not lacks_memory(error):
            raise


class _Calls:
    """The calls of a model and its FSDP units by the loss."""

    def __init__(self, code: OwnCode, anatomy: Anatomy, spec: JobSpec) -> None:
        self._code, self._spec = code, spec
        self._model = anatomy.model
        self._use = UnitUse(anatomy, spec.strategy, code.folder)
        for parameter in self._model.parameters():
            # Buffers keep their dtype under FSDP2.
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(DTYPES[spec.model.dtype])
        units = {one for unit in find_units(anatomy, spec.strategy.wrap_policy) for one in unit}
        self._units = {name: module for name, module in self._model.named_modules() if module in units}
        self._made = list[str]()
        for name, unit in [*self._units.items(), ("", self._model)]:
            unit.register_forward_pre_hook(lambda *_, name=name: self._made.append(name))
        if spec.strategy.cast_forward_inputs:
            self._model.register_forward_pre_hook(cast_inputs(DTYPES[spec.model.dtype]), with_kwargs=True)

    def check(self, batches: Iterator[Mapping[str, Any]]) -> None:
        """Call the loss with batches. Raises ModelError for calls that ranks could not make together."""
        found = list[list[str]]()
        for seed, batch in enumerate(batches):
            seed_generators(seed, step=0, rank=0)
            self._made.clear()
            with unchanged_buffers(self._code, self._model), self._use.watching():
                call_loss(self._code, self._model, batch)
            found.append([*self._made])
        self._check(found)
        self._use.check_root()

    def _check(self, found: list[list[str]]) -> None:
        if any("" not in calls for calls in found):
            raise ModelError(
                f"{self._code.spec.loss} does not call the model itself, but perhaps its parts; call the model, "
                "because FSDP gathers weights in its forward pass"
            )
        differing = [name for name in self._units if len({calls.count(name) for calls in found}) > 1]
        if self._spec.scaling.num_workers != 1 and any(calls != found[0] for calls in found):
            shown = ", ".join(differing[:3]) or "the layers in another order"
            raise ModelError(f"the loss calls {shown} at random or for some rows only, and ranks would differ; {_LIKE}")
        others = [name for name in ["", *self._units] if any(calls.count(name) != 1 for calls in found)]
        if self._spec.training.reproducible == "any_size" and others:
            count = next(calls.count(others[0]) for calls in found if calls.count(others[0]) != 1)
            raise ModelError(
                f"the loss calls {others[0] or 'the model'} {count} times, and reproducible=any_size needs one call of "
                f"each FSDP unit; {REMEDY_OF_CALLS}"
            )


_LIKE = f"FSDP gathers a layer on all ranks together; {REMEDY_OF_CALLS}"


def _needs_values(cause: BaseException | None) -> bool:
    """Return whether code failed only because tensors on meta have no values; ranks have them."""
    return isinstance(cause, NotImplementedError) or (isinstance(cause, RuntimeError) and "meta" in str(cause))
