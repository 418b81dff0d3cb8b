"""Steps of one model with each kind of recomputation, one after the other.

Run as `torchrun -m benchmarks.training.peak_memory.recompute_run OUT SETTINGS`. SETTINGS is JSON: config, tokens, rows,
packed, and the kinds by name. Rank 0 writes OUT: for each kind, the peak bytes of a second forward and backward pass
beyond the memory before it, and those of the plan, which has weights and gradients before.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.training.peak_memory.peak_run import begin_peak, peak
from train_loop.conformance.measure import accumulate_plainly
from train_loop.data.columns import token_columns
from train_loop.data.dataset import Dataset, Part, Rows
from train_loop.loop.batch import micro_batches, share_rows
from train_loop.loop.build import build_token_loss
from train_loop.parallel.build import build_sharded
from train_loop.parallel.mesh import Mesh, build_mesh
from train_loop.plan import Plan, plan_job
from train_loop.preflight.model import check_model
from train_loop.run_dir.read_policy import ReadPolicy
from train_loop.spec import JobSpec
from train_loop.spec import parse as parse_spec
from train_loop.system.exit import leave

OF_STEP = ("gathered_parameters", "activations", "attention_mask", "attention_scores", "logits")
"""Terms of the plan beyond weights, gradients and optimizer."""


def main() -> None:
    """Measure each kind and write the bytes."""
    out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    jobs = {name: job_of(settings, how) for name, how in settings["kinds"].items()}
    shape, _ = check_model(jobs["none"], ReadPolicy(project="default", roots=()))
    assert shape is not None
    mesh = build_mesh(plan_job(jobs["none"], shape).mesh, torch.device("cpu"))
    found = {}
    for name, job in jobs.items():
        plan = plan_job(job, shape)
        planned = sum(term.bytes for term in plan.memory if term.name in OF_STEP)
        found[name] = {"peak_bytes": step(job, plan, mesh, settings.get("packed", False)), "planned_bytes": planned}
        gc.collect()
    out.write_text(json.dumps(found))
    dist.destroy_process_group()


def job_of(settings: dict[str, Any], how: Any) -> JobSpec:
    """Return the spec of one kind."""
    raw: dict[str, Any] = {
        "name": "recompute",
        "model": {"config": settings["config"], "dtype": "fp32", "gradient_checkpointing": how},
        "data": {"train": {"path": "file:///tokens.parquet"}, "columns": {"input_ids": "ids"}},
        "training": {"learning_rate": 1e-3, "max_steps": 1},
        "scaling": {"num_workers": 1},
    }
    raw["data"] |= {"sequence_length": settings["tokens"], "packing": settings.get("packed", False)}
    rows = settings.get("rows", 1)
    raw["training"] |= {"per_device_train_batch_size": rows, "global_batch_size": 2 * rows}
    return parse_spec(raw)


def step(job: JobSpec, plan: Plan, mesh: Mesh, packed: bool) -> int:
    """Return the peak bytes of a second micro-batch, beyond what exists before it."""
    sharded = build_sharded(job, mesh)
    objective = build_token_loss(sharded, job, plan)
    rows, length = job.training.micro_batch, job.data.sequence_length
    ids = np.random.default_rng(0).integers(0, 256, (rows, length)).astype(np.int32)
    positions = np.arange(rows * length).reshape(rows, length) % (length // 4 if packed else length)
    values = (np.arange(rows), np.full(rows, length), ids, ids, positions.astype(np.int32))
    columns = Rows({column.name: value for column, value in zip(token_columns(), values, strict=True)})
    dataset = Dataset(fingerprint="x", parts=(Part(fingerprint="x", files=(), tokens=0),), sequence_length=length)
    batch = share_rows(columns, count=rows, dataset=dataset, mesh=mesh)
    for _ in range(2):
        before = begin_peak()
        accumulate_plainly(objective, micro_batches(batch, rows, sharded.anatomy, mesh), float(rows * length), mesh)
    return peak() - before


if __name__ == "__main__":
    main()
    leave()
