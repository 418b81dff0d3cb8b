"""Steps of one model with different FSDP units, in turn in the same ranks.

Run as `torchrun -m benchmarks.training.peak_memory.ends_run OUT SETTINGS`. SETTINGS is JSON: config, length, steps, and
the wrap policies by name. Rank 0 writes OUT: for each policy, the seconds of each forward and backward pass, the peak
bytes beyond the memory before it, and the bytes that the rank moves in it.
"""

import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks.traffic import Traffic
from benchmarks.training.peak_memory.peak_run import begin_peak, peak
from train_loop.model.folder import model_shape
from train_loop.parallel.build import build_sharded
from train_loop.parallel.mesh import build_mesh
from train_loop.plan import plan_job
from train_loop.spec import parse
from train_loop.system.exit import leave


def main() -> None:
    """Build the models, take turns, and write the measures of rank 0."""
    out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    models = {name: build(settings["config"], policy) for name, policy in settings["policies"].items()}
    found: dict[str, dict[str, list[int | float]]] = {name: {"seconds": [], "peak_bytes": []} for name in models}
    traffic = {name: Traffic() for name in models}
    ids = torch.randint(settings["config"]["vocab_size"], (1, settings["length"]))
    for number in range(settings["steps"]):
        turns = list(models)
        # Each policy is the first in turn.
        for name in [*turns[number % len(turns) :], *turns[: number % len(turns)]]:
            dist.barrier()
            before, begun = begin_peak(), perf_counter()
            step(models[name], ids)
            found[name]["seconds"].append(perf_counter() - begun)
            found[name]["peak_bytes"].append(peak() - before)
            models[name].zero_grad()
    for name, model in models.items():
        with traffic[name]:
            step(model, ids)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps({name: found[name] | {"traffic": one.counts()} for name, one in traffic.items()}))
    dist.barrier()
    dist.destroy_process_group()


def build(config: dict[str, Any], policy: dict[str, bool]) -> Any:
    """Return a sharded model with random weights."""
    world = dist.get_world_size()
    raw: dict[str, Any] = {
        "name": "ends",
        "model": {"config": config, "dtype": "fp32", "gradient_checkpointing": "none"},
        "data": {"train": {"path": "file:///tokens.parquet"}, "columns": {"input_ids": "ids"}},
        "training": {"learning_rate": 1e-3, "max_steps": 1},
        "strategy": {"wrap_policy": policy},
        "scaling": {"num_workers": world},
    }
    spec = parse(raw)
    mesh = build_mesh(plan_job(spec, model_shape(spec.model)).mesh, torch.device("cpu"))
    return build_sharded(spec, mesh).model


def step(model: Any, ids: torch.Tensor) -> None:
    """Compute a forward and a backward pass."""
    logits = model(input_ids=ids, use_cache=False).logits
    torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), ids.flatten()))


if __name__ == "__main__":
    main()
    leave()
