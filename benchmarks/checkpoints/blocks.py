"""Alternating blocks of steps with and without saves, to measure the cost of saves within one start."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

LENGTH, SAVED_AFTER = 8, (1, 5)
"""Steps per block, and the steps after which a block saves."""
WARM_UP, PAIRS = 2 * LENGTH, 2
"""The warm-up saves too, because the first save costs more than later ones."""
STEPS = WARM_UP + 2 * PAIRS * LENGTH


def saves_after(step: int) -> bool:
    """Return whether a save follows a step, counted from 1; only every second block saves."""
    block, place = divmod(step - 1, LENGTH)
    return block % 2 == 1 and place + 1 in SAVED_AFTER


def ends_block(step: int) -> bool:
    """Return whether a step is the last of a block."""
    return step % LENGTH == 0


@dataclass
class Clock:
    """End times of blocks. A block ends when all its saves are durable on all ranks."""

    marks: list[float] = field(default_factory=list)

    def mark(self) -> None:
        """Record the end of a block."""
        dist.barrier()
        self.marks.append(perf_counter())

    def write(self, out: Path) -> None:
        """Write the seconds that a save has added, for each pair of blocks; only on rank 0."""
        if dist.get_rank() == 0:
            out.write_text(json.dumps(list(self._added())))

    def _added(self) -> Iterator[float]:
        first = WARM_UP // LENGTH
        spans = [end - start for start, end in zip(self.marks, self.marks[1:], strict=False)][first - 1 :]
        for plain, saved in zip(spans[::2], spans[1::2], strict=True):
            yield (saved - plain) / len(SAVED_AFTER)
