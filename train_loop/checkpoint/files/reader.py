"""Reader of verified checkpoints: DCP's planning, with tensors copied from the file's pages to their targets."""

import io
import mmap
import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from train_loop.checkpoint.files.metadata import check_plain, parse_metadata
from train_loop.checkpoint.files.tensor_file import tensor_file_format
from train_loop.checkpoint.manifest import home_of, metadata_file, open_checkpoint_file
from train_loop.run_dir import is_remote, read_whole, storage_failed
from train_loop.system.retry import patiently


class CheckpointReader(FileSystemReader):
    """DCP's reader, without unpickling of tensors that are stored in the layout of `FileLayout`."""

    def __init__(self, folder: Path, *, patience: float = 0.0) -> None:
        """Create a reader. `patience`: seconds for which storage errors are retried."""
        super().__init__(str(folder))
        self._folder = folder
        self._patiently = partial(patiently, seconds=patience, may_pass=storage_failed)
        self._described: dict[str, Any] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the unpickled metadata. Called by DCP. Raises CheckpointError."""
        path = self._patiently(lambda: metadata_file(self._folder))
        return parse_metadata(self._patiently(lambda: read_whole(path, below=home_of(self._folder))), path)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep the metadata. Called by DCP."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._described = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the entries of a plan into their targets. Called by DCP."""
        per_file = defaultdict[str, list[ReadItem]](list)
        for item in plan.items:
            per_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in per_file.items():
            content = self._patiently(partial(_mapped, self._folder / name))
            for item in items:
                self._read(content, item, planner)
        done = Future[None]()
        done.set_result(None)
        return done

    def _read(self, content: memoryview, item: ReadItem, planner: LoadPlanner) -> None:
        place = self.storage_data[item.storage_index]
        blob = content[place.offset : place.offset + place.length]
        if item.type is LoadItemType.BYTE_IO:
            # The planner unpickles any class: of a copy that was checked, because the file may change.
            copy = bytes(blob)
            check_plain(copy, self._folder)
            planner.load_bytes(item, io.BytesIO(copy))
            return
        saved = self._tensor(blob, item.storage_index)
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(saved, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)

    def _tensor(self, blob: memoryview, index: MetadataIndex) -> Tensor:
        described = self._described[index.fqn]
        assert isinstance(described, TensorStorageMetadata), f"{index.fqn} was planned as a tensor"
        frame = tensor_file_format(_chunk(described, index).sizes, described.properties.dtype)
        data = frame.data_in(blob)
        if data is None:
            # Written by another version of torch, or a tensor subclass with its own pickling.
            data = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
        assert isinstance(data, Tensor), f"{index.fqn} was planned as a tensor"
        return data


def _chunk(described: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    hint = index.index
    if hint is not None and hint < len(described.chunks) and described.chunks[hint].offsets == index.offset:
        return described.chunks[hint]
    return next(chunk for chunk in described.chunks if chunk.offsets == (index.offset or chunk.offsets))


def _mapped(path: Path) -> memoryview:
    if is_remote(path):
        return memoryview(bytearray(read_whole(path)))
    with open_checkpoint_file(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        # A private, writable mapping: torch accepts no read-only memory.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
