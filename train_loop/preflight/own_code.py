"""Checks of own code before a job is stored. They run the code, in the forked process of one check."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from train_loop.code.keep import check_code_allowed
from train_loop.code.load import OwnCode, load_code
from train_loop.code.package import read_package, unpack
from train_loop.code.use import own_code
from train_loop.data.own_columns import first_rows, own_columns
from train_loop.data.prepare.cache import list_source
from train_loop.data.prepare.sources import check_plain
from train_loop.errors import ModelError, UserError
from train_loop.loop.objectives.own_loss import as_tensors, call_batch, call_loss, unchanged_buffers
from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.choose import family_of
from train_loop.parallel.unit_calls import REMEDY_OF_CALLS
from train_loop.parallel.units import find_units
from train_loop.preflight.fork_server import lacks_memory
from train_loop.run_dir import ReadPolicy
from train_loop.spec import CodeSpec, JobSpec, Problem
from train_loop.state import seed_generators

SetPointer = Callable[[str], object]
_CALLS = 8
"""Calls of the loss, each with other random numbers."""


def import_code(spec: JobSpec, policy: ReadPolicy, set_pointer: SetPointer) -> tuple[JobSpec, list[Problem]]:
    """Return a spec with the SHA-256 of its package, whose functions have been imported, and the problems of both.

    `set_pointer` is called with the JSON pointer of each check. A spec without code is returned unchanged.
    """
    if spec.code is None:
        return spec, []
    pointer = "/code"

    def begin(field: str) -> None:
        nonlocal pointer
        pointer = f"/code/{field}"
        set_pointer(pointer)

    try:
        check_code_allowed()
        begin("package")
        check_plain(spec.code.package, policy)
        package = read_package(spec.code.package)
        if problem := _other_digest(spec.code, package.sha256):
            return spec, [problem]
        code = spec.code.model_copy(update={"sha256": package.sha256})
        load_code(code, unpack(package), begin=begin)
    except UserError as error:
        if lacks_memory(error):
            raise
        return spec, [Problem(pointer, str(error))]
    return spec.model_copy(update={"code": code}), []


def _other_digest(code: CodeSpec, found: str) -> Problem | None:
    if code.sha256 in (None, found):
        return None
    return Problem(
        "/code/sha256",
        f"{code.package} has the SHA-256 {found} now, and not {code.sha256}; restore the package, or set code.sha256: "
        "null to take the new one",
    )


def check_calls(spec: JobSpec, set_pointer: SetPointer) -> list[Problem]:
    """Return the problems of the batch and the loss of the first rows, with a model on meta, which computes nothing."""
    assert spec.code is not None, "only specs with code are checked"
    pointer = "/data/columns"
    set_pointer(pointer)
    try:
        columns = _first_rows(spec)
        code, anatomy = own_code(spec.code), family_of(spec).build(spec.model)
        model = anatomy.model.to(DTYPES[spec.model.dtype])
        set_pointer(pointer := "/code/batch")
        batch = call_batch(code, columns, torch.device("meta"))
        set_pointer(pointer := "/code/loss")
        model.register_forward_pre_hook(_cast(DTYPES[spec.model.dtype]), with_kwargs=True)
        _call_often(code, anatomy, batch, spec)
    except UserError as error:
        if lacks_memory(error):
            raise
        return [] if _needs_values(error.__cause__) else [Problem(pointer, str(error))]
    return []


def _first_rows(spec: JobSpec) -> dict[str, Any]:
    """Return the rows of a first micro-batch by column. Raises DataError."""
    source = list_source(spec, spec.data.sources[0])
    columns = own_columns(source.files, source.columns.own)
    values = first_rows(source.files, columns, spec.training.per_device_train_batch_size)
    return {name: as_tensors(value, torch.device("cpu")) for name, value in values.items()}


def _call_often(code: OwnCode, anatomy: Anatomy, batch: Mapping[str, Any], spec: JobSpec) -> None:
    """Call the loss with other random numbers each time. Raises ModelError if the calls of units differ.

    FSDP gathers a unit on all ranks together. A layer that is left out at random would be called by some of them.
    """
    units = {unit: name for name, unit in anatomy.model.named_modules()}
    units = {one: units[one] for unit in find_units(anatomy, spec.strategy.wrap_policy) for one in unit}
    calls = list[str]()
    for unit, name in [*units.items(), (anatomy.model, "")]:
        unit.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    found = list[list[str]]()
    for seed in range(_CALLS):
        seed_generators(seed, step=0, rank=0)
        calls.clear()
        with unchanged_buffers(code, anatomy.model):
            call_loss(code, anatomy.model, batch)
        found.append([*calls])
    _check_calls_of_units(code, spec, found, [*units.values()])


def _check_calls_of_units(code: OwnCode, spec: JobSpec, found: list[list[str]], units: list[str]) -> None:
    """Raise ModelError for calls that ranks could not make together."""
    if "" not in found[0]:
        raise ModelError(
            f"{code.spec.loss} does not call the model itself, but perhaps its parts; call the model, because FSDP "
            "gathers weights in its forward pass"
        )
    differing = [name for name in units if len({calls.count(name) for calls in found}) > 1]
    if spec.scaling.num_workers != 1 and any(calls != found[0] for calls in found):
        shown = ", ".join(differing[:3]) or "the layers"
        raise ModelError(f"the loss calls {shown} at random, and each rank would draw differently; {REMEDY_OF_CALLS}")
    if spec.training.reproducible == "any_size":
        others = [name for name in ["", *units] if found[0].count(name) != 1]
        if others:
            raise ModelError(
                f"the loss calls {others[0] or 'the model'} {found[0].count(others[0])} times, and "
                f"reproducible=any_size needs one call of each FSDP unit; {REMEDY_OF_CALLS}"
            )


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    """Return a hook that gives a model its inputs in the compute dtype, as FSDP2 does."""

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def hook(module: nn.Module, arguments: Any, named: Any) -> tuple[Any, Any]:
        return tree_map_only(Tensor, cast, arguments), tree_map_only(Tensor, cast, named)

    return hook


def _needs_values(cause: BaseException | None) -> bool:
    """Return whether code failed only because tensors on meta have no values; ranks have them."""
    return isinstance(cause, NotImplementedError) or (isinstance(cause, RuntimeError) and "meta" in str(cause))
