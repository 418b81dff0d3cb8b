"""What all ranks know and decide together."""

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from train_loop.batch import StepBatch
from train_loop.parallel.mesh import Mesh
from train_loop.run_dir import RunDir, Stop

_STOPS = [None, *(Stop(mode=mode, checkpoint=keep) for mode in ("pause", "cancel", "resize") for keep in (True, False))]


@dataclass(frozen=True)
class Agreement:
    """The same on every rank."""

    trained_tokens: int
    """Positions of the whole step that have something to predict: what the loss is divided by."""
    tokens: int
    """Tokens of the whole step, padding not counted."""
    stop: Stop | None
    """What rank 0 was asked to do instead of this step."""


def who_works() -> list[dict[str, Any]]:
    """Where every rank runs, for the person who has to look there; a collective call."""
    workers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(workers, {"rank": dist.get_rank(), "host": socket.gethostname(), "pid": os.getpid()})
    return workers


def agree(batch: StepBatch, run_dir: RunDir, mesh: Mesh) -> Agreement:
    """Sum the step's tokens over data ranks, and hear from rank 0 whether the run directory asks for a stop."""
    numbers = torch.zeros(3, dtype=torch.int64, device=mesh.device)
    # Ulysses peers hold the same samples, and tokens count once.
    if mesh.sequence_rank == 0:
        numbers[0], numbers[1] = batch.trained_tokens, batch.lengths.sum()
    if mesh.rank == 0 and (stop := run_dir.stop()) is not None:
        numbers[2] = _STOPS.index(stop.model_copy(update={"deadline": None}))
    dist.all_reduce(numbers)
    trained, tokens, code = numbers.tolist()
    return Agreement(trained, tokens, _STOPS[code])
