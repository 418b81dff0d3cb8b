"""What `torch.save` writes around the bytes of a tensor: the same for every tensor of a shape and dtype."""

import io
import math
import zipfile
from dataclasses import dataclass
from functools import cache

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
    file, crc = io.BytesIO(), get_crc32_options()
    # The manifest has a SHA-256 over all of it; a CRC would be another one for every content.
    set_crc32_options(False)
    try:
        torch.save(torch.zeros(shape, dtype=dtype), file)
    finally:
        set_crc32_options(crc)
    blob = file.getvalue()
    with zipfile.ZipFile(file) as archive:
        (data,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    # A local header of 30 bytes, the last of which are the lengths of the name and the padding that follow it.
    name, extra = (int.from_bytes(blob[data.header_offset + at :][:2], "little") for at in (26, 28))
    start = data.header_offset + 30 + name + extra
    return Frame(blob[:start], blob[start + data.file_size :], shape, dtype)
