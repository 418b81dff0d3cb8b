"""A rank's file of a checkpoint: planned once with DCP's planner, laid out once, and filled for every save.

The file holds what DCP's own writer would put there, so that DCP's readers read it: each tensor as `torch.save` writes
it. What is around a tensor's bytes depends on its shape and dtype alone, so that a save only copies the bytes.
"""

import io
import math
import pickle
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from train_loop.checkpoint.frame import Frame, frame_of
from train_loop.checkpoint.staging import StagingBuffer
from train_loop.vitals import StepClock

_ALIGNMENT = 64


class Extent(NamedTuple):
    """Where something lies in a file, in bytes."""

    start: int
    length: int


Places = dict[MetadataIndex, Extent]


@dataclass(frozen=True)
class Slot:
    """A tensor's place in the file."""

    item: WriteItem
    frame: Frame
    start: int

    @property
    def data(self) -> int:
        """Where its bytes begin."""
        return self.start + len(self.frame.head)

    @property
    def end(self) -> int:
        """Behind its frame."""
        return self.start + self.frame.size


@dataclass(frozen=True)
class Contents:
    """What one save writes into this rank's file: bytes that stay as they are until the next save begins."""

    pieces: list[memoryview]
    objects: Places
    """Where what is no plain tensor lies; it has another length at every save."""


class Image:
    """This rank's share of a run's state as the bytes of a file. Made and used by all ranks of a group together.

    With a staging buffer the bytes are copies, and training may go on; without, they are the tensors' own.
    """

    def __init__(self, group: dist.ProcessGroup, staging: StagingBuffer | None) -> None:
        self.file = f"__{dist.get_rank(group)}_{uuid.uuid4().hex[:8]}.distcp"
        """Its name: nobody else writes to it, not even a process that was thought dead."""
        self._group = group
        self._staging = staging
        self._keys: list[str] = []
        self._slots: list[Slot] = []
        self._objects: list[WriteItem] = []
        self._copies: list[Tensor] = []
        self._metadata = Metadata({})
        self._names: list[str] = []
        self._tensors: list[Places] = []

    def take(self, values: dict[str, Any], clock: StepClock) -> Contents:
        """The present values as bytes; a collective call."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(values, is_coordinator=dist.get_rank(self._group) == 0)
        keys = list(planner.state_dict)
        with clock.waiting():
            # An optimizer gets a state for a parameter with its first gradient, which may come late.
            changed = self._anywhere(keys != self._keys)
        if changed:
            self._lay_out(planner)
            self._keys = keys
        tensors = [_local(planner, slot.item) for slot in self._slots]
        pieces = self._in_place(tensors) if self._staging is None else self._copied(tensors)
        end = self._slots[-1].end if self._slots else 0
        objects: Places = {}
        for item in self._objects:
            data = _pickled(planner, item)
            objects[item.index] = Extent(end, len(data))
            pieces.append(memoryview(data))
            end += len(data)
        return Contents(pieces, objects)

    def metadata(self, objects: Iterable[Places]) -> bytes:
        """DCP's `.metadata` for where every rank has put its objects; on rank 0 alone."""
        placed = {
            index: _StorageInfo(name, *extent)
            for name, tensors, others in zip(self._names, self._tensors, objects, strict=True)
            for index, extent in (tensors | others).items()
        }
        whole = Metadata(
            self._metadata.state_dict_metadata, self._metadata.planner_data, placed, version=CURRENT_DCP_VERSION
        )
        return pickle.dumps(whole)

    def _anywhere(self, flag: bool) -> bool:
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
        return bool(flags)

    def _lay_out(self, planner: DefaultSavePlanner) -> None:
        """Agree with the other ranks on who writes what, and give everything of this rank its place in the file."""
        plan, self._metadata = _agree_on_plan(planner, self._group)
        self._slots, self._objects, end = [], [], 0
        for item in plan.items:
            tensor = None if item.type is WriteItemType.BYTE_IO else _local(planner, item)
            # A subclass may hold several tensors, and pickles them its own way.
            if tensor is None or type(tensor) is not Tensor:
                self._objects.append(item)
                continue
            start = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
            slot = Slot(item, frame_of(tensor.shape, tensor.dtype), start)
            self._slots.append(slot)
            end = slot.end
        places = {slot.item.index: Extent(slot.start, slot.end - slot.start) for slot in self._slots}
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, (self.file, places), self._group)
        self._names, self._tensors = [name for name, _ in told], [others for _, others in told]
        if self._staging is not None:
            self._frame_buffer(self._staging, end)

    def _frame_buffer(self, staging: StagingBuffer, size: int) -> None:
        whole = staging.resize(size)
        self._copies = []
        for slot in self._slots:
            _put(whole, slot.start, slot.frame.head)
            _put(whole, slot.end - len(slot.frame.tail), slot.frame.tail)
            self._copies.append(_tensor_at(whole, slot))

    def _copied(self, tensors: list[Tensor]) -> list[memoryview]:
        assert self._staging is not None, "copies lie in a staging buffer"
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        return [self._staging.copied()]

    def _in_place(self, tensors: list[Tensor]) -> list[memoryview]:
        pieces, end = [], 0
        for slot, tensor in zip(self._slots, tensors, strict=True):
            gap, flat = bytes(slot.start - end), tensor.contiguous().reshape(-1).view(torch.uint8)
            pieces += [memoryview(gap + slot.frame.head), flat.numpy().data, memoryview(slot.frame.tail)]
            end = slot.end
        return pieces


def _agree_on_plan(planner: DefaultSavePlanner, group: dist.ProcessGroup) -> tuple[SavePlan, Metadata]:
    """What this rank writes, and on rank 0 what all of it comes to; what several ranks hold is written by one."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    plans: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(planner.create_local_plan(), plans, group=group, group_dst=0)
    metadata, dealt = Metadata({}), list[Any]()
    if plans is not None:
        try:
            dealt, metadata = planner.create_global_plan(plans)
        except ValueError as error:
            dealt = [error] * world
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, dealt if rank == 0 else None, group=group, group_src=0)
    if isinstance(mine[0], ValueError):
        raise mine[0]
    return planner.finish_plan(mine[0]), metadata


def _local(planner: DefaultSavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor), f"{item.index.fqn} is planned as a tensor"
    return tensor.detach()


def _pickled(planner: DefaultSavePlanner, item: WriteItem) -> bytes:
    data: Any = planner.resolve_data(item)
    if isinstance(data, Tensor):
        file = io.BytesIO()
        torch.save(data.detach().cpu(), file)
        data = file
    content: bytes = data.getvalue()
    return content


def _tensor_at(whole: Tensor, slot: Slot) -> Tensor:
    frame = slot.frame
    if not frame.nbytes:
        return torch.empty(frame.shape, dtype=frame.dtype)
    return whole[slot.data : slot.data + frame.nbytes].view(frame.dtype).view(frame.shape)


def _put(whole: Tensor, start: int, data: bytes) -> None:
    if not data:
        # Of a tensor without elements all is in the head.
        return
    whole[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
