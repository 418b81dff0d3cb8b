"""Lightning Fabric with its FSDP2 strategy."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import get_cosine_schedule_with_warmup

from benchmarks.training.trace import Trace, check_sharded, trace_under_torchrun
from benchmarks.workload import Workload


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP2 as in Fabric's guide: each block, then the root."""
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


class Trained(NamedTuple):
    """Objects and loss after a step."""

    fabric: Fabric
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: float


def train(workload: Workload, folder: Path) -> Trace:
    """Train this rank's share."""
    trace = Trace()
    for trained in steps(workload, folder):
        trace.step_ended(trained.loss)
    return trace


def steps(workload: Workload, folder: Path) -> Iterator[Trained]:
    """Train step by step; yield the objects and loss of each step."""
    strategy = ModelParallelStrategy(shard, data_parallel_size=workload.world, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=workload.world, strategy=strategy, precision="32-true")
    fabric.launch()
    model = fabric.setup(workload.first_model(folder).train())
    check_sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, weight_decay=0.0, fused=True)
    optimizer = fabric.setup_optimizers(optimizer)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 0, workload.steps)
    for rows in workload.tokens(folder):
        ids = rows[fabric.global_rank]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=workload.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield Trained(fabric, model, optimizer, fabric.all_reduce(loss.detach()).item())


if __name__ == "__main__":
    trace_under_torchrun(train)
