"""Staging memory for saves: training continues while a copy of the run's state is written."""

import mmap
import os

import torch
from torch import Tensor


class StagingBuffer:
    """Host memory that all saves reuse; pinned if there is a GPU, and optionally shared with another process."""

    def __init__(self, *, shared: bool) -> None:
        self._on_gpu = torch.cuda.is_available()
        # A memfd: it has no name that could outlive this process, and no size limit as /dev/shm has.
        self.descriptor = os.memfd_create("checkpoint") if shared else None
        """File descriptor for another process to map; None if the memory is not shared."""
        self._memory: mmap.mmap | None = None
        self._whole = torch.empty(0, dtype=torch.uint8)

    def resize(self, size: int) -> Tensor:
        """Return the whole buffer as page-aligned bytes, shape [size]. Its previous content is lost."""
        self._release()
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, size)
        if size == 0:
            return self._whole
        self._memory = mmap.mmap(-1 if self.descriptor is None else self.descriptor, size)
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        if self._on_gpu:
            _pin(self._whole)
        return self._whole

    def copied(self) -> memoryview:
        """Wait for the copies in flight, and return the whole buffer."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return self._whole.numpy().data

    def close(self) -> None:
        """Release the memory."""
        self._release()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _release(self) -> None:
        if self._memory is not None and self._on_gpu:
            _unpin(self._whole)
        # Remaining views keep it mapped.
        self._whole, self._memory = torch.empty(0, dtype=torch.uint8), None


def _pin(memory: Tensor) -> None:
    _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]


def _unpin(memory: Tensor) -> None:
    _check(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))  # type: ignore[no-untyped-call]


def _check(error: int) -> None:
    if int(error) != 0:
        raise RuntimeError(f"CUDA could not pin host memory for checkpoints: error {int(error)}")
