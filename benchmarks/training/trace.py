"""Trace of a program: the end time and loss of each optimizer step."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.harness import Measured
from benchmarks.launch import ProgramError
from benchmarks.workload import Workload
from train_loop.system.exit import leave

LOSS_TOLERANCE = 1e-4
"""Relative tolerance; a different order of summation changes an fp32 loss by less over these few steps."""


class Trace(BaseModel):
    """The steps of one run, in order."""

    ends: list[float] = []
    """End of each step in Unix seconds."""
    losses: list[float] = []
    """Cross entropy per token over all ranks, before each update."""

    @classmethod
    def read(cls, file: Path) -> "Trace":
        """Read a trace from a file."""
        return cls.model_validate_json(file.read_bytes())

    @classmethod
    def of_metrics(cls, lines: Iterable[Mapping[str, float]]) -> "Trace":
        """Return the trace of Trainshed's metrics lines, which are written at the end of their step."""
        steps = list(lines)
        return cls(ends=[line["time"] for line in steps], losses=[line["loss"] for line in steps])

    def step_ended(self, loss: float) -> None:
        """Record the end of a step."""
        self.ends.append(time.time())
        self.losses.append(loss)

    def step_seconds(self, first: int) -> float:
        """Return the mean wall-clock seconds per step, from the end of step `first` to the end of the last."""
        return (self.ends[-1] - self.ends[first - 1]) / (len(self.ends) - first)

    def write(self, file: Path) -> None:
        """Write the trace to a file."""
        file.write_text(self.model_dump_json())


def measure(trace: Trace, workload: Workload, reference: Path) -> Measured:
    """Return the seconds per step. If `reference` does not exist, write the trace to it.

    Raises ProgramError if steps are missing, or if losses differ from the reference: the program trained otherwise.
    """
    if len(trace.losses) != workload.steps:
        raise ProgramError(f"the program did {len(trace.losses)} steps; expected {workload.steps}")
    if not reference.exists():
        trace.write(reference)
    off = loss_difference(trace.losses, Trace.read(reference).losses)
    return Measured(trace.step_seconds(workload.first_counted), trace.model_dump() | {"loss_difference": off})


def loss_difference(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the largest relative difference. Raises ProgramError if it exceeds the tolerance."""
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, baseline, strict=True))
    if off > LOSS_TOLERANCE:
        raise ProgramError(f"its losses differ from the baseline's by up to {off:.1e}, more than {LOSS_TOLERANCE:.0e}")
    return off


def check_sharded(model: nn.Module) -> None:
    """Raise RuntimeError for an unsharded parameter: such a program would save the communication."""
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise RuntimeError(f"it trains without FSDP2: {whole[0]} and {len(whole) - 1} other parameters are not sharded")


def trace_under_torchrun(train: Callable[[Workload, Path], Trace]) -> None:
    """Train the workload in FOLDER on this rank, called as `-m PEER FOLDER OUT`; rank 0 writes its trace to OUT."""
    folder, out = map(Path, sys.argv[1:])
    trace = train(Workload.read(folder), folder)
    if dist.get_rank() == 0:
        trace.write(out)
    # A rank that closes its connections too early can end another rank without a traceback.
    dist.barrier()
    dist.destroy_process_group()
    leave()
