"""What every program of a comparison leaves behind: when each optimizer step ended, and its loss."""

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
"""Relative; another order of summation moves an fp32 loss by less over these few steps."""


class Trace(BaseModel):
    """The steps of one run, in order."""

    ends: list[float] = []
    """Unix seconds."""
    losses: list[float] = []
    """Cross entropy per token over all ranks, before the step."""

    @classmethod
    def read(cls, file: Path) -> "Trace":
        """A trace that was written."""
        return cls.model_validate_json(file.read_bytes())

    @classmethod
    def of_metrics(cls, lines: Iterable[Mapping[str, float]]) -> "Trace":
        """The trace of a run of ours: a metrics line is written when all of its step has been done."""
        steps = list(lines)
        return cls(ends=[line["time"] for line in steps], losses=[line["loss"] for line in steps])

    def step_ended(self, loss: float) -> None:
        """Note a step."""
        self.ends.append(time.time())
        self.losses.append(loss)

    def step_seconds(self, first: int) -> float:
        """Mean wall-clock seconds a step, from the end of step `first` to the end of the last."""
        return (self.ends[-1] - self.ends[first - 1]) / (len(self.ends) - first)

    def write(self, file: Path) -> None:
        """The inverse of `read`."""
        file.write_text(self.model_dump_json())


def measure(trace: Trace, workload: Workload, reference: Path) -> Measured:
    """Seconds a step; the first trace that comes is written to `reference`.

    Raises ProgramError where steps are missing or losses are not the reference's: then it did something else.
    """
    if len(trace.losses) != workload.steps:
        raise ProgramError(f"{len(trace.losses)} steps were done, not {workload.steps}")
    if not reference.exists():
        trace.write(reference)
    off = loss_difference(trace.losses, Trace.read(reference).losses)
    return Measured(trace.step_seconds(workload.first_counted), trace.model_dump() | {"loss_difference": off})


def loss_difference(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """The largest relative difference. Raises ProgramError where it is one of more than summation's order."""
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, baseline, strict=True))
    if off > LOSS_TOLERANCE:
        raise ProgramError(f"its losses are up to {off:.1e} off the baseline's, more than {LOSS_TOLERANCE:.0e}")
    return off


def check_sharded(model: nn.Module) -> None:
    """Raise RuntimeError where a parameter is whole: what does not shard saves itself the communication."""
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise RuntimeError(f"it trains without FSDP2: {whole[0]} and {len(whole) - 1} other parameters are not sharded")


def trace_under_torchrun(train: Callable[[Workload, Path], Trace]) -> None:
    """`-m PEER FOLDER OUT`: train the workload in FOLDER on this rank; rank 0 writes its trace to OUT."""
    folder, out = map(Path, sys.argv[1:])
    trace = train(Workload.read(folder), folder)
    if dist.get_rank() == 0:
        trace.write(out)
    # A rank that closes its connections while another still uses them can end that one without a traceback.
    dist.barrier()
    dist.destroy_process_group()
    leave()
