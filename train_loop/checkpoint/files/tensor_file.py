"""What `torch.save` writes around the bytes of a tensor: the same for every tensor of a shape and dtype."""

import io
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options


@dataclass(frozen=True)
class Frame:
    """The bytes before and after a tensor's own."""

    head: bytes
    tail: bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the tensor alone."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Of all of it."""
        return len(self.head) + self.nbytes + len(self.tail)

    def data_in(self, blob: memoryview) -> Tensor | None:
        """The tensor in what `torch.save` has written, without a copy; None where the frame is another one."""
        start, end = len(self.head), len(self.head) + self.nbytes
        if blob.nbytes != self.size or blob[:start] != self.head or blob[end:] != self.tail:
            return None
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(blob[start:end], dtype=self.dtype).view(self.shape)


@cache
def frame_of(shape: torch.Size, dtype: torch.dtype) -> Frame:
    """The frame of contiguous tensors of a shape and dtype, by this version of torch."""
    # Never written to and never read: it takes no memory.
    tensor, crc = torch.empty(shape, dtype=dtype), get_crc32_options()
    sink = _Sink(tensor)
    # The manifest has a SHA-256 over all of it; a CRC would be another one for every content.
    set_crc32_options(False)
    try:
        torch.save(tensor, sink)  # type: ignore[arg-type]
    finally:
        set_crc32_options(crc)
    return Frame(bytes(sink.head), bytes(sink.tail), shape, dtype)


class _Sink(io.RawIOBase):
    """Takes what `torch.save` writes, but for the bytes of the tensor, which it hands over as they lie in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._place = tensor.data_ptr()
        self.head, self.tail = bytearray(), bytearray()
        self._now = self.head

    def write(self, data: Any) -> int:
        """Called by torch."""
        array = np.frombuffer(data, dtype=np.uint8)
        if array.size and array.ctypes.data == self._place:
            self._now = self.tail
        else:
            self._now += data
        return array.size
