"""Tensors of a checkpoint, read in pieces by a process without a model."""

import io
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from train_loop.checkpoint.files.metadata import parse_metadata
from train_loop.checkpoint.files.tensor_file import tensor_file_format
from train_loop.checkpoint.manifest import metadata_file, open_checkpoint_file
from train_loop.errors import CheckpointError

_PIECE_BYTES = 16 * 2**20


class Piece(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    values: Tensor

    @property
    def box(self) -> tuple[slice, ...]:
        """Location in the tensor, as slices."""
        return tuple(slice(o, o + size) for o, size in zip(self.offsets, self.values.shape, strict=True))


def whole(pieces: Iterable[Piece]) -> Piece:
    """Return a tensor that its pieces cover; replicas have the same place."""
    held = [piece for piece in pieces if piece.values.numel()]
    shape = [max(part.stop for part in parts) for parts in zip(*(piece.box for piece in held), strict=True)]
    values = held[0].values.new_empty(shape)
    for piece in held:
        values[piece.box] = piece.values
    return Piece((0,) * len(shape), values)


class CheckpointTensors:
    """The tensors of a checkpoint."""

    def __init__(self, folder: Path, *, opener: Callable[[Path], io.BufferedReader] = open_checkpoint_file) -> None:
        """Read the metadata in `folder`. `opener` opens its files."""
        self._folder, self._opener = folder, opener
        metadata = _read_metadata(folder, opener)
        self._places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data or {}
        described = metadata.state_dict_metadata
        paths = metadata.planner_data or {}
        self.paths = {name: tuple(map(str, paths.get(name, (name,)))) for name in described}
        """Keys that lead to each entry in the state dict that was saved, tensors and others, by name."""
        self._tensors = {name: of for name, of in described.items() if isinstance(of, TensorStorageMetadata)}
        self._whole_chunk = threading.Lock()
        """Lock of chunks that can only be read as a whole: one is in memory at a time."""

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted: weights, optimizer states and averages."""
        return sorted(self._tensors)

    def has(self, name: str) -> bool:
        """Return whether the checkpoint contains a tensor."""
        return name in self._tensors

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a whole tensor."""
        return self._tensors[name].size

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._tensors[name].properties.dtype

    def pieces(self, name: str) -> Iterator[Piece]:
        """Yield a tensor in pieces of whole rows, some megabytes each, so that only one is in memory at a time."""
        if self._has_columns(name):
            yield from self._joined(name)
            return
        tensor = self._tensors[name]
        for chunk in tensor.chunks:
            yield from self._pieces_of(name, chunk, tensor.properties.dtype)

    def check_places(self) -> None:
        """Raise CheckpointError if a chunk lies outside its tensor or the folder, or if chunks do not cover a tensor.

        Call it for a checkpoint that another program wrote.
        """
        for name, tensor in self._tensors.items():
            filled = [chunk for chunk in tensor.chunks if math.prod(chunk.sizes)]
            chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in filled}
            inside = all(
                len(offsets) == len(sizes) == len(tensor.size)
                and all(0 <= o <= o + s <= of for o, s, of in zip(offsets, sizes, tensor.size, strict=True))
                for offsets, sizes in chunks.items()
            )
            if not inside or sum(map(math.prod, chunks.values())) != tensor.size.numel():
                raise CheckpointError(f"{name} of shape {list(tensor.size)} has chunks that do not cover it once")
            for chunk in tensor.chunks:
                place = self._places.get(MetadataIndex(name, chunk.offsets))
                if place is None or not self._is_plain(place):
                    raise CheckpointError(f"{name} has a chunk that is not a plain file of the folder; save it again")

    def _is_plain(self, place: _StorageInfo) -> bool:
        there = (self._folder / place.relative_path).is_file()
        return there and not place.transform_descriptors and min(place.offset, place.length) >= 0

    def row_major_bytes(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in row-major order, some megabytes at a time, each valid until the next.

        Raises CheckpointError unless its chunks are consecutive whole rows, as FSDP2 shards parameters, or cover all of
        it, as those of ranks that share layers.
        """
        if self._has_columns(name):
            for piece in self._joined(name):
                yield _bytes(piece.values)
            return
        tensor, row = self._tensors[name], 0
        # Replicas have the same offsets. A rank without rows has an empty chunk.
        chunks = {tuple(chunk.offsets): chunk for chunk in tensor.chunks if math.prod(chunk.sizes)}
        for offsets, chunk in sorted(chunks.items()):
            if (
                offsets != (row, *(0 for _ in tensor.size[1:]))[: len(tensor.size)]
                or chunk.sizes[1:] != tensor.size[1:]
            ):
                raise CheckpointError(
                    f"{name} of shape {list(tensor.size)} has a chunk of shape {list(chunk.sizes)} at {list(offsets)}; "
                    "only chunks of consecutive whole rows (dimension 0) can be read in row-major order"
                )
            row += chunk.sizes[0] if chunk.sizes else 1
            yield from self._bytes_of(name, chunk, tensor.properties.dtype)
        if math.prod(tensor.size) and row != (tensor.size[0] if tensor.size else 1):
            raise CheckpointError(f"{name} of shape {list(tensor.size)} has chunks for {row} rows only")

    def _has_columns(self, name: str) -> bool:
        """Return whether a chunk of a tensor has a part of its rows' elements."""
        tensor = self._tensors[name]
        return any(chunk.sizes[1:] != tensor.size[1:] for chunk in tensor.chunks if math.prod(chunk.sizes))

    def _joined(self, name: str) -> Iterator[Piece]:
        """Yield rows that are joined from the chunks that have parts of them."""
        tensor = self._tensors[name]
        chunks = list({tuple(one.offsets): one for one in tensor.chunks if math.prod(one.sizes)}.values())
        if sum(math.prod(one.sizes) for one in chunks) != math.prod(tensor.size):
            raise CheckpointError(f"{name} of shape {list(tensor.size)} has chunks that do not cover it once")
        dtype, count = tensor.properties.dtype, tensor.size[0]
        most = max(_PIECE_BYTES // (math.prod(tensor.size[1:]) * dtype.itemsize), 1)
        for start in range(0, count, most):
            stop = min(start + most, count)
            rows = torch.empty((stop - start, *tensor.size[1:]), dtype=dtype)
            for chunk in chunks:
                first, last = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0])
                if first < last:
                    part = zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)
                    place = (slice(first - start, last - start), *(slice(o, o + size) for o, size in part))
                    rows[place] = self._rows_of(name, chunk, first - chunk.offsets[0], last - chunk.offsets[0])
            yield Piece((start, *(0 for _ in tensor.size[1:])), rows)

    def _rows_of(self, name: str, chunk: ChunkStorageMetadata, first: int, last: int) -> Tensor:
        place, dtype = self._places[MetadataIndex(name, chunk.offsets)], self.dtype(name)
        frame, shape = tensor_file_format(chunk.sizes, dtype), torch.Size([last - first, *chunk.sizes[1:]])
        with self._opener(self._folder / place.relative_path) as file:
            file.seek(place.offset)
            if place.length != frame.size or file.read(len(frame.head)) != frame.head:
                return _load(file, place, chunk.sizes, dtype)[first:last]
            file.seek(first * math.prod(chunk.sizes[1:]) * dtype.itemsize, io.SEEK_CUR)
            return _read(file, shape, dtype)

    def _bytes_of(self, name: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Iterator[memoryview]:
        place = self._places[MetadataIndex(name, chunk.offsets)]
        frame = tensor_file_format(chunk.sizes, dtype)
        with self._opener(self._folder / place.relative_path) as file:
            file.seek(place.offset)
            if place.length != frame.size or file.read(len(frame.head)) != frame.head:
                with self._whole_chunk:
                    yield _bytes(_load(file, place, chunk.sizes, dtype))
                return
            # One buffer for all reads: an allocation for each would leave large gaps in the heap.
            buffer, left = memoryview(bytearray(min(_PIECE_BYTES, frame.nbytes))), frame.nbytes
            while left:
                part = buffer[:left]
                _fill(file, part)
                yield part
                left -= len(part)

    def _pieces_of(self, name: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Iterator[Piece]:
        place = self._places[MetadataIndex(name, chunk.offsets)]
        frame, offsets = tensor_file_format(chunk.sizes, dtype), tuple(chunk.offsets)
        with self._opener(self._folder / place.relative_path) as file:
            file.seek(place.offset)
            if place.length != frame.size or file.read(len(frame.head)) != frame.head:
                yield Piece(offsets, _load(file, place, chunk.sizes, dtype))
                return
            if not chunk.sizes:
                yield Piece(offsets, _read(file, torch.Size(), dtype))
                return
            row = math.prod(chunk.sizes[1:]) * dtype.itemsize
            rows = max(_PIECE_BYTES // max(row, 1), 1)
            for start in range(0, chunk.sizes[0], rows):
                shape = torch.Size([min(rows, chunk.sizes[0] - start), *chunk.sizes[1:]])
                yield Piece((offsets[0] + start, *offsets[1:]), _read(file, shape, dtype))


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors in a checkpoint with verified metadata, by the model's names."""
    described = _read_metadata(folder, open_checkpoint_file).state_dict_metadata
    tensors = {name: of for name, of in described.items() if isinstance(of, TensorStorageMetadata)}
    return {name.removeprefix("model."): tuple(of.size) for name, of in tensors.items() if name.startswith("model.")}


def _read_metadata(folder: Path, opener: Callable[[Path], io.BufferedReader]) -> Metadata:
    path = metadata_file(folder)
    with opener(path) as file:
        return parse_metadata(file.read(), path)


def _bytes(values: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _load(file: io.BufferedReader, place: _StorageInfo, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Read a chunk as a whole: another version of torch has written it. Raises CheckpointError."""
    file.seek(place.offset)
    blob = io.BytesIO(file.read(place.length))
    values: Tensor = torch.load(blob, map_location="cpu", weights_only=True)
    if values.shape != shape or values.dtype != dtype:
        raise CheckpointError(f"{place.relative_path} holds another tensor than the metadata says; copy it again")
    return values


def _fill(file: io.BufferedReader, view: memoryview) -> None:
    if file.readinto(view) != len(view):
        raise CheckpointError("a file of the checkpoint was truncated while it was read; choose another checkpoint")


def _read(file: io.BufferedReader, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    content = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    _fill(file, content.numpy().data)
    return content.view(dtype).view(shape)
