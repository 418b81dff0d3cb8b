"""Bytes that `torch.save` writes around a tensor's data: the same for all tensors of a shape and dtype."""

import io
import math
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

_crc_options = threading.Lock()
"""Lock of torch's option of CRCs, which is global."""


@dataclass(frozen=True)
class TensorFileFormat:
    """The bytes before and after a tensor's data."""

    head: bytes
    tail: bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Total size in bytes, head and tail included."""
        return len(self.head) + self.nbytes + len(self.tail)

    def data_in(self, blob: memoryview) -> Tensor | None:
        """Return the tensor in the output of `torch.save`, without a copy; None if the output has another frame."""
        start, end = len(self.head), len(self.head) + self.nbytes
        if blob.nbytes != self.size or blob[:start] != self.head or blob[end:] != self.tail:
            return None
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(blob[start:end], dtype=self.dtype).view(self.shape)


@cache
def tensor_file_format(shape: torch.Size, dtype: torch.dtype) -> TensorFileFormat:
    """Return the frame of contiguous tensors of a shape and dtype, for this version of torch."""
    # The tensor's memory is never accessed, so it takes no physical memory.
    tensor = torch.empty(shape, dtype=dtype)
    sink = _Sink(tensor)
    with _crc_options:
        crc = get_crc32_options()
        # No CRC, as it would depend on the data; the manifest has a SHA-256 of the whole file.
        set_crc32_options(False)
        try:
            torch.save(tensor, sink)  # type: ignore[arg-type]
        finally:
            set_crc32_options(crc)
    return TensorFileFormat(bytes(sink.head), bytes(sink.tail), shape, dtype)


class _Sink(io.RawIOBase):
    """A file for `torch.save` that keeps everything except the tensor's data, which torch passes without a copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._place = tensor.data_ptr()
        self.head, self.tail = bytearray(), bytearray()
        self._now = self.head

    def write(self, data: Any) -> int:
        """Keep or skip `data`. Called by torch."""
        array = np.frombuffer(data, dtype=np.uint8)
        if array.size and array.ctypes.data == self._place:
            self._now = self.tail
        else:
            self._now += data
        return array.size
