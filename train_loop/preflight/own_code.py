"""Checks of own code before a job is stored. They run the code, in the forked process of one check."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from train_loop.code.keep import check_code_allowed
from train_loop.code.load import load_code
from train_loop.code.package import read_package, unpack
from train_loop.code.use import own_code
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.prepare.sources import check_plain
from train_loop.errors import UserError
from train_loop.loop.objectives.own_loss import call_batch, call_loss, read_columns
from train_loop.model.build import DTYPES
from train_loop.model.families.choose import family_of
from train_loop.preflight.fork_server import lacks_memory
from train_loop.run_dir import ReadPolicy
from train_loop.spec import CodeSpec, JobSpec, Problem

SetPointer = Callable[[str], object]


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
        dataset = find_dataset(spec, Path(os.devnull))
        count = min(spec.training.per_device_train_batch_size, dataset.samples)
        columns = read_columns(dataset, np.arange(count), torch.device("cpu"))
        code, model = own_code(spec.code), family_of(spec).build(spec.model).model.to(DTYPES[spec.model.dtype])
        set_pointer(pointer := "/code/batch")
        batch = call_batch(code, columns, torch.device("meta"))
        set_pointer(pointer := "/code/loss")
        model.register_forward_pre_hook(_cast(DTYPES[spec.model.dtype]), with_kwargs=True)
        call_loss(code, model, batch)
    except UserError as error:
        if lacks_memory(error):
            raise
        return [] if _needs_values(error.__cause__) else [Problem(pointer, str(error))]
    return []


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
