"""A rank's files of a checkpoint: planned once with DCP's planner, laid out once, and filled at every save.

They have the format of DCP's own writer, so that DCP's readers can read them: each tensor as `torch.save` writes it.
The bytes around a tensor's data depend only on its shape and dtype, so a save only copies the data.
"""

import io
import math
import pickle
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from train_loop.checkpoint.files.staging import StagingBuffer
from train_loop.checkpoint.files.tensor_file import TensorFileFormat, tensor_file_format
from train_loop.checkpoint.parts import described
from train_loop.telemetry.timers import StepTimer

FILE_BYTES = 2**28
"""Maximum size of a checkpoint file in bytes, unless a tensor is larger: files are hashed concurrently."""
_PAGE, _ALIGNMENT = 4096, 64
"""Alignment in bytes: of files in memory, for direct writes, and of tensors in a file."""


class Extent(NamedTuple):
    """The location of an entry in a checkpoint, in bytes."""

    file: str
    start: int
    length: int


TensorLocations = dict[MetadataIndex, Extent]


@dataclass(frozen=True)
class Slot:
    """The location of a tensor in the image."""

    item: WriteItem
    frame: TensorFileFormat
    start: int
    file: int
    """Number of the file."""

    @property
    def data(self) -> int:
        """Offset of the tensor's data."""
        return self.start + len(self.frame.head)

    @property
    def end(self) -> int:
        """Offset after the tensor's frame."""
        return self.start + self.frame.size


@dataclass(frozen=True)
class Contents:
    """The bytes that one save writes to this rank's files; they do not change until the next save begins."""

    files: dict[str, list[memoryview]]
    objects: TensorLocations
    """Locations of entries that are not plain tensors; their lengths change at every save."""


class FileLayout:
    """This rank's share of a run's state, as the bytes of files. All ranks of a group create and use it together.

    With a staging buffer the bytes are copies, and training may continue. Without it, they are the tensors' own memory.
    """

    def __init__(self, group: dist.ProcessGroup, staging: StagingBuffer | None) -> None:
        # The names are unique: not even a process that was presumed dead writes to these files.
        self._stem = f"__{dist.get_rank(group)}_{uuid.uuid4().hex[:8]}"
        self._group = group
        self._staging = staging
        self._keys: list[str] = []
        self._slots: list[Slot] = []
        self._cuts = [0, 0]
        """Offsets at which files begin and end."""
        self._objects: list[WriteItem] = []
        self._copies: list[Tensor] = []
        self._metadata = Metadata({})
        self._tensors: list[TensorLocations] = []

    def take(self, values: dict[str, Any], clock: StepTimer) -> Contents:
        """Return the current values as bytes. A collective call."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(described(values), is_coordinator=dist.get_rank(self._group) == 0)
        keys = list(planner.state_dict)
        with clock.waiting():
            # An optimizer creates the state of a parameter at its first gradient, which may come after earlier saves.
            changed = self._anywhere(keys != self._keys)
        if changed:
            self._lay_out(planner)
            self._keys = keys
        tensors = [_local(planner, slot.item) for slot in self._slots]
        files = self._in_place(tensors) if self._staging is None else self._copied(tensors)
        *_, last = files
        end = self._cuts[-1] - self._cuts[-2]
        objects: TensorLocations = {}
        for item in self._objects:
            data = _pickled(planner, item)
            objects[item.index] = Extent(last, end, len(data))
            files[last].append(memoryview(data))
            end += len(data)
        return Contents(files, objects)

    def metadata(self, objects: Iterable[TensorLocations]) -> bytes:
        """Return DCP's `.metadata`, given the locations of every rank's objects. For rank 0 only."""
        placed = {
            index: _StorageInfo(*extent)
            for tensors, others in zip(self._tensors, objects, strict=True)
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
        """Agree with the other ranks on which rank writes which entry, and assign file locations to this rank's own."""
        plan, self._metadata = _agree_on_plan(planner, self._group)
        self._slots, self._objects, cuts, end = [], [], [0], 0
        for item in plan.items:
            tensor = None if item.type is WriteItemType.BYTE_IO else _local(planner, item)
            # A subclass may contain several tensors, and pickles them in its own way.
            if tensor is None or type(tensor) is not Tensor:
                self._objects.append(item)
                continue
            start, frame = _aligned(end, _ALIGNMENT), tensor_file_format(tensor.shape, tensor.dtype)
            if start > cuts[-1] and start + frame.size - cuts[-1] > FILE_BYTES:
                start = _aligned(end, _PAGE)
                cuts.append(start)
            self._slots.append(Slot(item, frame, start, len(cuts) - 1))
            end = start + frame.size
        self._cuts = [*cuts, end]
        locations: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(locations, self._places(), self._group)
        self._tensors = locations
        if self._staging is not None:
            self._frame_buffer(self._staging, end)

    def _file(self, number: int) -> str:
        return f"{self._stem}_{number}.distcp"

    def _places(self) -> TensorLocations:
        """Return the locations of this rank's tensors."""
        return {
            slot.item.index: Extent(self._file(slot.file), slot.start - self._cuts[slot.file], slot.frame.size)
            for slot in self._slots
        }

    def _frame_buffer(self, staging: StagingBuffer, size: int) -> None:
        whole = staging.resize(size)
        self._copies = []
        for slot in self._slots:
            _put(whole, slot.start, slot.frame.head)
            _put(whole, slot.end - len(slot.frame.tail), slot.frame.tail)
            self._copies.append(_tensor_at(whole, slot))

    def _copied(self, tensors: list[Tensor]) -> dict[str, list[memoryview]]:
        assert self._staging is not None, "copies lie in a staging buffer"
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        whole = self._staging.copied()
        return {self._file(number): [whole[start:end]] for number, (start, end) in enumerate(pairwise(self._cuts))}

    def _in_place(self, tensors: list[Tensor]) -> dict[str, list[memoryview]]:
        files: list[list[memoryview]] = [[] for _ in pairwise(self._cuts)]
        end = 0
        for slot, tensor in zip(self._slots, tensors, strict=True):
            # Padding before a tensor; there is none at the start of a file.
            gap = bytes(slot.start - max(end, self._cuts[slot.file]))
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            files[slot.file] += [memoryview(gap + slot.frame.head), flat.numpy().data, memoryview(slot.frame.tail)]
            end = slot.end
        return {self._file(number): pieces for number, pieces in enumerate(files)}


def _aligned(place: int, to: int) -> int:
    return math.ceil(place / to) * to


def _agree_on_plan(planner: DefaultSavePlanner, group: dist.ProcessGroup) -> tuple[SavePlan, Metadata]:
    """Return this rank's plan, and on rank 0 the metadata of all ranks; one rank writes each replicated entry."""
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
        # A tensor without elements has only a head.
        return
    whole[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
