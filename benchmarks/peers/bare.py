"""The baseline: a minimal FSDP2 loop with the same losses."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup

from benchmarks.training.trace import Trace, check_sharded, trace_under_torchrun
from benchmarks.workload import Workload


def train(workload: Workload, folder: Path) -> Trace:
    """Train this rank's share; the process group must exist."""
    trace = Trace()
    for loss in steps(workload, folder):
        trace.step_ended(loss)
    return trace


def clip(model: nn.Module, max_norm: float) -> None:
    """Clip gradients by their norm."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


class Bare(NamedTuple):
    """Model, optimizer and scheduler of the loop, and the way in which gradients are clipped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    clip: Callable[[nn.Module, float], None] = clip


def build(workload: Workload, folder: Path) -> Bare:
    """Build the sharded model, its optimizer and its scheduler."""
    model = workload.first_model(folder).train()
    mesh = init_device_mesh("cpu", (workload.world,))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    check_sharded(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=workload.learning_rate, weight_decay=0.0, fused=True)
    return Bare(model, optimizer, get_cosine_schedule_with_warmup(optimizer, 0, workload.steps))


def steps(workload: Workload, folder: Path, built: Bare | None = None, *, done: int = 0) -> Iterator[float]:
    """Train step by step, after `done` steps; yield the loss of each over all ranks."""
    built = built or build(workload, folder)
    place = dist.get_rank() * workload.data_ranks // workload.world
    for rows in workload.tokens(folder)[done:]:
        loss = step(built, rows[place], workload.max_grad_norm)
        built.scheduler.step()
        yield loss


def step(built: Bare, ids: torch.Tensor, max_norm: float) -> float:
    """Run one optimizer step on rows [B, T]; return the loss over all ranks."""
    logits = built.model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    torch.autograd.backward(loss)
    built.clip(built.model, max_norm)
    built.optimizer.step()
    built.optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    trace_under_torchrun(train)
