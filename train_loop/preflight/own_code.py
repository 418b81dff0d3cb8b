"""Checks of own code before a job is stored. They run the code, in the forked process of one check."""

from collections.abc import Callable
from typing import Any

import torch

from train_loop.code.keep import check_code_allowed
from train_loop.code.load import load_code
from train_loop.code.package import read_package, unpack, unpacked
from train_loop.code.use import own_code
from train_loop.data.own_columns import first_rows, own_columns
from train_loop.data.prepare.cache import list_source
from train_loop.data.prepare.sources import check_plain
from train_loop.errors import UserError
from train_loop.loop.objectives.own_loss import as_tensors, call_batch, split_batch
from train_loop.model.families.choose import family_of
from train_loop.preflight.own_calls import CALLS, META, check_loss, first_batch
from train_loop.preflight.process.fork_server import lacks_memory
from train_loop.run_dir import ReadPolicy
from train_loop.spec import CodeSpec, JobSpec, Problem

SetPointer = Callable[[str], object]


def read_code(spec: JobSpec, policy: ReadPolicy, set_pointer: SetPointer) -> tuple[CodeSpec | None, list[Problem]]:
    """Return a spec's code with the SHA-256 of its package, which is now unpacked; or its problems. Runs no code."""
    if spec.code is None:
        return None, []
    set_pointer(pointer := "/code")
    try:
        check_code_allowed()
        set_pointer(pointer := "/code/package")
        check_plain(spec.code.package, policy)
        package = read_package(spec.code.package)
        if problem := _other_digest(spec.code, package.sha256):
            return None, [problem]
        unpack(package)
    except UserError as error:
        if lacks_memory(error):
            raise
        return None, [Problem(pointer, str(error))]
    return spec.code.model_copy(update={"sha256": package.sha256}), []


def import_code(code: CodeSpec, set_pointer: SetPointer) -> list[Problem]:
    """Import the functions of a spec's code, which has been unpacked. Return the problems."""
    assert code.sha256 is not None, "it was read"
    pointer = "/code"

    def begin(field: str) -> None:
        nonlocal pointer
        set_pointer(pointer := f"/code/{field}")

    try:
        load_code(code, unpacked(code.sha256), begin=begin)
    except UserError as error:
        if lacks_memory(error):
            raise
        return [Problem(pointer, str(error))]
    return []


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
        columns = first_rows_of(spec)
        code, anatomy = own_code(spec.code), family_of(spec).build(spec.model)
        set_pointer(pointer := "/code/batch")
        batch = call_batch(code, first_batch(columns, spec), META)
        set_pointer(pointer := "/code/sequence")
        split_batch(code, batch, part=0, parts=spec.strategy.ulysses_size)
        set_pointer(pointer := "/code/loss")
        check_loss(code, anatomy, columns, spec)
    except UserError as error:
        if lacks_memory(error):
            raise
        return [Problem(pointer, str(error))]
    return []


def first_rows_of(spec: JobSpec) -> dict[str, Any]:
    """Return the rows of a first micro-batch by column, and some more. Raises DataError."""
    source = list_source(spec, spec.data.sources[0])
    columns = own_columns(source.files, source.columns.own)
    values = first_rows(source.files, columns, max(spec.training.micro_batch, CALLS))
    return {name: as_tensors(value, torch.device("cpu")) for name, value in values.items()}
