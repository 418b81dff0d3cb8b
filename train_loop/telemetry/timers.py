"""Per-rank statistics of steps: own time and peak memory."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import torch

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes per unit of ru_maxrss."""
Moment = float | torch.cuda.Event
"""Seconds of the host's clock, or an event in the GPU's stream."""


class RankStats(NamedTuple):
    """Statistics of a rank, as integers, because ranks exchange them in one tensor."""

    own_nanoseconds: int
    """Time since the last statistics, without waits for other ranks."""
    device_bytes: int
    """Peak memory of tensors on the GPU; 0 without a GPU."""
    host_bytes: int
    """Peak memory of the process."""


class ComputeTimer:
    """Timer of a rank's compute time in training steps, without waits for other ranks.

    On a GPU it uses events in the stream, because the host runs ahead of the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._since: Moment | None = None
        self._spans: list[tuple[Moment, Moment]] = []
        self._is_paused = False

    def start(self) -> None:
        """Start a span of compute time."""
        self._since = self._now()

    def drop(self) -> None:
        """Discard the open span."""
        self._since, self._is_paused = None, False

    def stop(self) -> None:
        """Close the open span, before the rank may wait."""
        if self._since is not None:
            self._spans.append((self._since, self._now()))
            self._since = None

    def pause(self) -> None:
        """Close the open span, if there is one, until `resume`."""
        self._is_paused = self._since is not None
        self.stop()

    def resume(self) -> None:
        """Start a span if `pause` has closed one."""
        if self._is_paused:
            self.start()
        self._is_paused = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the body, in which the rank waits for others, from the compute time."""
        self.pause()
        yield
        self.resume()

    def take(self) -> float:
        """Return the compute seconds since the last call. On a GPU, the timed work must have finished."""
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


class StepTimer:
    """Clock of one rank's steps.

    Ranks wait for each other many times per step. The others waited for the rank with the most own time, which may be
    due to data, compute, logging, garbage collection, a checkpoint or its host.
    """

    def __init__(self) -> None:
        self._start = self._own_start = perf_counter()
        self.data_wait_seconds = 0.0
        self._saving = 0.0

    def begin(self) -> None:
        """Start a step, before its wait for data."""
        self._start = perf_counter()

    def data_arrived(self) -> None:
        """Record the end of the wait for the step's rows."""
        self.data_wait_seconds = self.seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the body, in which the rank waits for others, from its own time."""
        started = perf_counter()
        yield
        self._own_start += perf_counter() - started

    @contextmanager
    def training(self, timer: ComputeTimer) -> Iterator[None]:
        """Count only the timer's compute time of the body as own time; the rest is waiting."""
        with self.waiting():
            yield
        self._own_start -= timer.take()

    @property
    def seconds(self) -> float:
        """Return the seconds since the step began."""
        return perf_counter() - self._start

    def take_vitals(self, device: torch.device) -> RankStats:
        """Return this rank's statistics and reset its own time."""
        now, on_gpu = perf_counter(), device.type == "cuda"
        own, self._own_start = now - self._own_start, now
        return RankStats(
            own_nanoseconds=round(own * 1e9),
            device_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT,
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the body as time in which a checkpoint blocks the loop."""
        started = perf_counter()
        yield
        self._saving += perf_counter() - started

    def take_saving_seconds(self) -> float:
        """Return the seconds that checkpoints blocked the loop since the last call."""
        taken, self._saving = self._saving, 0.0
        return taken
