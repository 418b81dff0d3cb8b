"""Steps in blocks, with saves and without in turn, so that what saves add is told within one start."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

LENGTH, SAVED_AFTER = 8, (1, 5)
"""Steps of a block, and those of its steps that are followed by a save."""
WARM_UP, PAIRS = 2 * LENGTH, 2
"""The warm-up saves too: what is made at the first save is not what every save costs."""
STEPS = WARM_UP + 2 * PAIRS * LENGTH


def saves_after(step: int) -> bool:
    """Whether a save follows a step, counted from 1: in every other block."""
    block, place = divmod(step - 1, LENGTH)
    return block % 2 == 1 and place + 1 in SAVED_AFTER


def ends_block(step: int) -> bool:
    """Whether a step is the last of a block."""
    return step % LENGTH == 0


@dataclass
class Clock:
    """When blocks ended: a block ends when all that it has saved is durable on all ranks."""

    marks: list[float] = field(default_factory=list)

    def mark(self) -> None:
        """A block ends here."""
        dist.barrier()
        self.marks.append(perf_counter())

    def write(self, out: Path) -> None:
        """Rank 0 writes what a save has added, in seconds, for each pair of blocks."""
        if dist.get_rank() == 0:
            out.write_text(json.dumps(list(self._added())))

    def _added(self) -> Iterator[float]:
        first = WARM_UP // LENGTH
        spans = [end - start for start, end in zip(self.marks, self.marks[1:], strict=False)][first - 1 :]
        for plain, saved in zip(spans[::2], spans[1::2], strict=True):
            yield (saved - plain) / len(SAVED_AFTER)
