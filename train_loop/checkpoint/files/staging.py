"""Memory that a save copies a run's state into, so that training goes on while it is written."""

import mmap
import os

import torch
from torch import Tensor


class StagingBuffer:
    """Host memory, kept from save to save; pinned where there is a GPU, and shared with another process if asked to."""

    def __init__(self, *, shared: bool) -> None:
        self._on_gpu = torch.cuda.is_available()
        # No name that could outlive this process, and no limit of /dev/shm.
        self.descriptor = os.memfd_create("checkpoint") if shared else None
        """What another process maps; None where it is not shared."""
        self._memory: mmap.mmap | None = None
        self._whole = torch.empty(0, dtype=torch.uint8)

    def resize(self, size: int) -> Tensor:
        """All of it as bytes, [size], from the start of a page on; what was in it is lost."""
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
        """All of it, once the copies that were begun are there."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return self._whole.numpy().data

    def close(self) -> None:
        """Give the memory back."""
        self._release()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _release(self) -> None:
        if self._memory is not None and self._on_gpu:
            _unpin(self._whole)
        # Whoever still has a piece of it keeps it mapped.
        self._whole, self._memory = torch.empty(0, dtype=torch.uint8), None


def _pin(memory: Tensor) -> None:
    _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]


def _unpin(memory: Tensor) -> None:
    _check(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))  # type: ignore[no-untyped-call]


def _check(error: int) -> None:
    if int(error) != 0:
        raise RuntimeError(f"CUDA could not pin host memory for checkpoints: error {int(error)}")
