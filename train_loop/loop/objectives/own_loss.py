"""The objective of own code: its loss function returns a sum and the count by which the loop divides the step's sum."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from train_loop.code.load import OwnCode, describe_fault
from train_loop.data.dataset import Dataset
from train_loop.data.order import PADDING, Ids
from train_loop.data.stream.local import read_rows
from train_loop.errors import ModelError
from train_loop.loop.batch import MicroBatch, StepBatch
from train_loop.loop.objectives.objective import Terms
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.faults import passes_unchanged
from train_loop.parallel.sequence_part import part_of
from train_loop.run_dir import is_transient
from train_loop.state import rng_state, seed_generators, set_rng_state

_UNCALLED = ": it uses a parameter while the module that holds it, or the FSDP unit around it, is not called; call that"
"""Advice for an error of tensors that a rank has only a shard of."""


class OwnLoss:
    """The loss of own code.

    Rows that only fill the last step of a run are left out. A rank that has no others computes the loss of the first
    sample times zero, because its peers wait for its part of the model.
    """

    def __init__(self, anatomy: Anatomy, code: OwnCode, dataset: Dataset) -> None:
        self.anatomy = anatomy
        self._code, self._dataset = code, dataset
        self._stand_in: Mapping[str, Any] = {}
        self._called = False
        self.columns = ()
        self.sums = code.spec.sums
        self.evaluation_sums = ("loss", "count", *self.sums)

    def divisor(self, batch: StepBatch) -> None:
        """Return None: only the loss has the count."""

    def __call__(self, batch: MicroBatch) -> Terms:
        """Return the terms of the rows of a micro-batch. Raises ModelError for errors of own code."""
        rows = [number for number, sample in enumerate(batch.samples.tolist()) if sample != PADDING]
        device, names = batch.samples.device, [column.name for column in self._dataset.parts[0].own]
        if not rows and not self._stand_in:
            self._stand_in = read_columns(self._dataset, np.zeros(1, np.int64), device)
        columns = {name: _chosen(batch.values[name], rows) for name in names} if rows else self._stand_in
        prepared = self._prepared(columns, device)
        with nullcontext() if self._called else unchanged_buffers(self._code, self.anatomy.model):
            terms = call_loss(self._code, self.anatomy.model, prepared)
        self._called = True
        return terms if rows else _nothing(terms)

    def _prepared(self, columns: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Return the batch of some rows: this rank's part of it, if ranks share its sequences."""
        part = part_of(self.anatomy.model)
        if part is None:
            return call_batch(self._code, columns, device)
        # One rank makes it: with random numbers in the code, its peers would make another one.
        shared = [call_batch(self._code, columns, torch.device("cpu")) if part.rank == 0 else None]
        dist.broadcast_object_list(shared, group=part.group, group_src=0, device=device)
        assert shared[0] is not None
        mine = split_batch(self._code, shared[0], part=part.rank, parts=part.ranks)
        return on_device(mine, device)

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the sums of the loss and of its count, and the further sums.

        Random numbers depend on the batch's first sample alone, so that all evaluations draw the same on any mesh.
        """
        with random_numbers_of(int(batch.samples[0])):
            terms = self(batch)
        assert terms.count is not None
        # The count may be a number, whose tensor is on the CPU.
        values = (terms.total, terms.count, *terms.sums.values())
        return tuple(value.to(terms.total.device) for value in values)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return each sum divided by the count, NaN if that is 0, and the count."""
        means = {name: (sums[name] / sums["count"]).item() for name in ("loss", *self.sums)}
        return means | {"count": round(sums["count"].item())}


def _nothing(terms: Terms) -> Terms:
    assert terms.count is not None
    sums = {name: value * 0 for name, value in terms.sums.items()}
    return Terms(terms.total * 0, terms.count * 0, sums, stands_in=True)


def read_columns(dataset: Dataset, samples: Ids, device: torch.device) -> dict[str, Any]:
    """Return the own columns of some samples as a micro-batch has them."""
    values, names = read_rows(dataset, samples).values, [column.name for column in dataset.parts[0].own]
    return {name: as_tensors(values[name], device) for name in names}


def as_tensors(values: Any, device: torch.device) -> Any:
    """Return arrays as tensors on a device, also those in a list; other values unchanged."""
    if isinstance(values, list):
        return [as_tensors(value, device) for value in values]
    return torch.tensor(values, device=device) if isinstance(values, np.ndarray) else values


@contextmanager
def random_numbers_of(sample: int) -> Iterator[None]:
    """Seed the random generators for a sample within the context, and leave them unchanged."""
    before = rng_state()
    seed_generators(0, step=0, rank=sample)
    try:
        yield
    finally:
        set_rng_state(before)


@contextmanager
def unchanged_buffers(code: OwnCode, model: nn.Module) -> Iterator[None]:
    """Raise ModelError if the body changes a buffer that checkpoints hold: it would have other values on each rank."""
    before = {name: (tensor, tensor._version) for name, tensor in _saved_buffers(model)}
    yield
    for name, tensor in _saved_buffers(model):
        if name not in before or not (before[name][0] is tensor and before[name][1] == tensor._version):
            raise ModelError(
                f"{code.spec.model}: its forward pass changes the buffer {name}, which each rank would do with its own "
                "rows; compute it from the batch, or register it with persistent=False if it only caches values"
            )


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, tensor in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, tensor


def call_batch(code: OwnCode, columns: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the batch of some rows on a device. Raises ModelError."""
    entry = code.spec.batch
    with _faults(code, entry):
        found = code.batch(dict(columns))
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ModelError(f"{entry} returned {_described(found)}; return a mapping of names to tensors")
    return on_device(dict(found), device)


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a batch whose tensors are on a device."""
    moved: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
    return moved


def split_batch(code: OwnCode, batch: Mapping[str, Any], *, part: int, parts: int) -> dict[str, Any]:
    """Return one of the equal parts of a batch, whose entries in code.sequence are split. Raises ModelError."""
    found = dict(batch)
    for name, dim in code.spec.sequence.items():
        value = batch.get(name)
        if not isinstance(value, Tensor) or value.ndim <= dim:
            shown = "has no such entry" if name not in batch else f"has {_described(value)} there"
            raise ModelError(f"code.sequence splits dimension {dim} of {name}, and the batch {shown}; correct either")
        if value.shape[dim] % parts:
            raise ModelError(
                f"ulysses_size={parts} does not divide the {value.shape[dim]} of dimension {dim} of {name}, which "
                "code.sequence splits; choose another length or ulysses_size"
            )
        width = value.shape[dim] // parts
        found[name] = value.narrow(dim, part * width, width)
    return found


def call_loss(code: OwnCode, model: nn.Module, batch: Mapping[str, Any]) -> Terms:
    """Return the terms of a batch. Raises ModelError for errors of own code, and for anything else than terms."""
    entry, names = code.spec.loss, code.spec.sums
    with _faults(code, entry):
        found = code.loss(model, batch)
    form = "(sum, count)" if not names else f"(sum, count, {{{', '.join(names)}}})"
    if not isinstance(found, tuple) or len(found) != 2 + bool(names):
        raise ModelError(f"{entry} returned {_described(found)}; return {form}")
    total, count, *rest = found
    if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point():
        raise ModelError(f"{entry} returned {_described(total)} as the sum; return a float tensor without dimensions")
    if torch.is_grad_enabled() and not total.requires_grad:
        raise ModelError(f"{entry} returned a sum without gradient; compute it from the output of the model")
    sums = dict(rest[0]) if rest and isinstance(rest[0], Mapping) else {}
    if sums.keys() != set(names):
        raise ModelError(f"{entry} returned the sums {sorted(sums)}; return those of code.sums: {sorted(names)}")
    return Terms(
        total, _number(entry, "count", count, total), {name: _number(entry, name, sums[name], total) for name in names}
    )


def _number(entry: str, name: str, value: Any, beside: Tensor) -> Tensor:
    if isinstance(value, Tensor) and not value.ndim and not value.is_complex():
        return value.detach()
    if isinstance(value, int | float):
        if name == "count" and not value >= 0:
            raise ModelError(f"{entry} returned the count {value}; return 0 or more: what the sum is a sum of")
        return torch.tensor(value, dtype=torch.float64, device=beside.device)
    raise ModelError(f"{entry} returned {_described(value)} as {name}; return a number or a tensor without dimensions")


@contextmanager
def _faults(code: OwnCode, entry_point: str) -> Iterator[None]:
    """Raise ModelError with file and line for errors of own code; errors of memory and of other ranks pass."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lasts = isinstance(error, OSError) and not is_transient(error)
        if passes_unchanged(error) and not lasts:
            raise
        told = describe_fault(f"{entry_point} failed", error, code.folder)
        raise ModelError(f"{told}{_UNCALLED if 'mixed torch.Tensor and DTensor' in told else ''}") from error


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} with the shape {list(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


def _chosen(values: Any, rows: list[int]) -> Any:
    """Return some rows of a column."""
    if len(rows) == len(values):
        return values
    return values[rows] if isinstance(values, Tensor) else [values[row] for row in rows]
