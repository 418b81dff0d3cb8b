"""What a rank says of itself at every step: its own time and its memory."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import torch

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class Vitals(NamedTuple):
    """A rank's state at a step, in whole numbers, as ranks tell them each other."""

    own_nanoseconds: int
    """Since the ranks last agreed, without what it waited for its Ulysses peers."""
    device_bytes: int
    """Most memory that tensors took on the GPU; 0 without one."""
    host_bytes: int
    """Most memory that the process took."""


class StepClock:
    """Times the steps of one rank.

    All ranks leave an agreement at once, and the last one to come to the next is the one that the others wait for, so
    that its time between the two names it: whether data, logging, garbage, a checkpoint or the host kept it.
    """

    def __init__(self) -> None:
        self._start = self._agreed = perf_counter()
        self.data_wait_seconds = 0.0
        self._saving = 0.0

    def begin(self) -> None:
        """A step begins, with its wait for data."""
        self._start = perf_counter()

    def data_arrived(self) -> None:
        """The rows of the step are here."""
        self.data_wait_seconds = self.seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The rank waits for others, which is no time of its own."""
        started = perf_counter()
        yield
        self._agreed += perf_counter() - started

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return perf_counter() - self._start

    def vitals(self, device: torch.device) -> Vitals:
        """This rank's state, on its way to an agreement."""
        on_gpu = device.type == "cuda"
        return Vitals(
            own_nanoseconds=round((perf_counter() - self._agreed) * 1e9),
            device_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT,
        )

    def all_agreed(self) -> None:
        """All ranks go on from here."""
        self._agreed = perf_counter()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The loop stands still for a checkpoint."""
        started = perf_counter()
        yield
        self._saving += perf_counter() - started

    def take_saving_seconds(self) -> float:
        """How long the loop stood still for checkpoints since this was asked last."""
        taken, self._saving = self._saving, 0.0
        return taken
