"""What a rank says of itself at every step: its own time and its memory."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import torch

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in which the operating system counts the most memory of a process."""
Moment = float | torch.cuda.Event
"""Seconds of the host's clock, or a place in the GPU's stream."""


class Vitals(NamedTuple):
    """A rank's state at a step, in whole numbers, as ranks tell them each other."""

    own_nanoseconds: int
    """Since it was told last, without what the rank waited for others."""
    device_bytes: int
    """Most memory that tensors took on the GPU; 0 without one."""
    host_bytes: int
    """Most memory that the process took."""


class ComputeTimer:
    """Adds up what a rank computes in training steps, between the points where it may wait for others.

    On a GPU by events in its stream: the host runs ahead of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._since: Moment | None = None
        self._spans: list[tuple[Moment, Moment]] = []

    def start(self) -> None:
        """The rank computes from here."""
        self._since = self._now()

    def drop(self) -> None:
        """What was started last, and not stopped since, does not count."""
        self._since = None

    def stop(self) -> None:
        """The rank may wait from here."""
        if self._since is not None:
            self._spans.append((self._since, self._now()))
            self._since = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The rank waits for others amid what it computes."""
        computing = self._since is not None
        self.stop()
        yield
        if computing:
            self.start()

    def take(self) -> float:
        """Seconds since this was asked last. On a GPU, what was timed must be done."""
        self.drop()
        spans, self._spans = self._spans, []
        return sum(map(_seconds, spans))

    def _now(self) -> Moment:
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _seconds(span: tuple[Moment, Moment]) -> float:
    match span:
        case (float() as start, float() as end):
            return end - start
        case (torch.cuda.Event() as start, torch.cuda.Event() as end):
            return float(start.elapsed_time(end)) / 1e3
    raise TypeError(span)


class StepClock:
    """Times the steps of one rank.

    Ranks wait for each other many times a step. The one that took most time of its own is the one that the others
    waited for: whether data, computing, logging, garbage, a checkpoint or the host kept it.
    """

    def __init__(self) -> None:
        self._start = self._told = perf_counter()
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
        self._told += perf_counter() - started

    @contextmanager
    def training(self, timer: ComputeTimer) -> Iterator[None]:
        """The ranks train together: what the timer saw this one compute is its own, and the rest is waiting."""
        with self.waiting():
            yield
        self._told -= timer.take()

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return perf_counter() - self._start

    def take_vitals(self, device: torch.device) -> Vitals:
        """This rank's state, to be told now."""
        now, on_gpu = perf_counter(), device.type == "cuda"
        own, self._told = now - self._told, now
        return Vitals(
            own_nanoseconds=round(own * 1e9),
            device_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT,
        )

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
