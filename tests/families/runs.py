"""Whole runs of small models on the existing ranks: undisturbed, or killed, resized and resumed."""

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from tests.families.objectives import OBJECTIVES, OWN, with_objective
from tests.families.parity import CASES, Case, Settings, raw_job
from tests.support.builders.specs import may_read
from tests.support.ranks.first_step import divisor_of
from tests.support.ranks.gradients import forget_meshes, mesh_of
from tests.support.waiting import wait_for
from train_loop.code.package import read_package, unpack
from train_loop.code.use import keep_code, with_own_code
from train_loop.conformance import measure
from train_loop.data.dataset import Rows
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.prepare.pointer import pin
from train_loop.data.stream.local import StreamPlan, local_stream, read_rows
from train_loop.loop.batch import micro_batches, share_rows
from train_loop.loop.build import build_objective, build_state
from train_loop.loop.session import Session
from train_loop.parallel.build import build_sharded
from train_loop.plan import MeshPlan, ModelShape, plan_job
from train_loop.preflight.call_sizes import measure_call
from train_loop.preflight.model import check_model
from train_loop.run_dir import RunDir, Stop
from train_loop.spec import JobSpec, parse
from train_loop.train import train

STEPS, MICRO_BATCHES = 5, 4


class Kind(NamedTuple):
    """A kind of model with an objective, and the file of its rows."""

    family: str
    objective: str
    settings: Settings
    rows: Path


class Leg(NamedTuple):
    """An attempt of a run: its mesh, the step after which it ends, and how."""

    case: Case
    stops_at: int = STEPS
    end: Literal["kill", "resize"] = "resize"


UNDISTURBED = (Leg(CASES["one rank, plain"]),)
DISTURBED = (
    Leg(Case("FSDP 2", 2), stops_at=3, end="kill"),
    Leg(CASES["HSDP 2 x 2, plain"], stops_at=4),
    Leg(CASES["one rank, plain"]),
)
"""SIGKILL ends the first attempt after the checkpoint of step 2 and a third step that no checkpoint contains."""
_SHARED = Case("tp 2", 2, tp_size=2)
SHARED = (DISTURBED[0]._replace(case=_SHARED), DISTURBED[1], DISTURBED[2]._replace(case=_SHARED))
"""The same, with ranks that share layers in the first and the last attempt."""
_EXPERTS, _BOTH = (Case(f"tp {tp} x ep 2", 2, tp_size=tp, others=(("strategy", "ep_size", 2),)) for tp in (1, 2))
SHARED_EXPERTS = (DISTURBED[0]._replace(case=_EXPERTS), DISTURBED[1], DISTURBED[2]._replace(case=_BOTH))
"""The same, with ranks that share experts in the first and the last attempt, and layers in the last."""


def job_of(kind: Kind, case: Case) -> JobSpec:
    """Return the spec of an attempt."""
    raw = _raw(kind, case)
    config = raw["model"]["config"]
    # Dropout depends on the number of ranks.
    raw["model"]["config"] = config | {name: 0.0 for name, value in config.items() if "drop" in name and value}
    raw["data"] |= {"shuffle": True}
    rows = OBJECTIVES[kind.objective].rows
    raw["training"] = {"max_steps": STEPS, "max_grad_norm": 0.3, "weight_decay": 0.1, "learning_rate": 1e-3}
    raw["training"] |= {"per_device_train_batch_size": rows, "global_batch_size": MICRO_BATCHES * rows}
    raw["training"] |= {"audit_samples": True}
    raw["training"] |= {field: value for part, field, value in case.others if part == "training"}
    raw["checkpoint"] = {"every_steps": 2}
    return parse(with_objective(raw, kind.family, kind.objective, kind.rows))


def _raw(kind: Kind, case: Case) -> dict[str, Any]:
    return raw_job("qwen3" if kind.family == OWN else kind.family, case, kind.settings)


def train_leg(kind: Kind, leg: Leg, folder: Path, attempt: int) -> str:
    """Train an attempt from the newest checkpoint of a run; return its result."""
    torch.set_num_threads(1)
    tempfile.tempdir = str(kind.rows.parent)  # own code is unpacked there
    job, run_dir, batch = job_of(kind, leg.case), RunDir(folder), MICRO_BATCHES * OBJECTIVES[kind.objective].rows

    def stream(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
        for step, rows in enumerate(local_stream(plan, mesh, rank), start=plan.start // batch):
            if step == leg.stops_at and rank == 0:
                _end(leg, run_dir)
            yield rows

    if dist.get_rank() == 0:
        run_dir.write_spec(job)
        keep_code(job, run_dir, lambda warning: None)
    dist.barrier()
    job = with_own_code(job, run_dir)
    dataset = find_dataset(job, kind.rows.parent)
    if dist.get_rank() == 0:
        pin(dataset, run_dir.data)
    session = Session(dist.get_rank(), dist.get_world_size(), 0, attempt, run_dir, stream)
    return train(job, session, dataset).result


def _end(leg: Leg, run_dir: RunDir) -> None:
    if leg.end == "resize":
        return run_dir.write_stop(Stop(mode="resize"))
    wait_for(run_dir.manifests, "the first checkpoint")
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def measure_memory(kind: Kind, shape: ModelShape, world: int) -> tuple[dict[str, int], measure.Memory]:
    """Return the bytes by term of the plan, and those of a second step with two micro-batches on the existing ranks."""
    torch.set_num_threads(1)
    forget_meshes()
    tempfile.tempdir = str(kind.rows.parent)
    job = unpacked_job(kind, world=world)
    plan, mesh = plan_job(job, shape), mesh_of(job)
    sharded, dataset = build_sharded(job, mesh), find_dataset(job, kind.rows.parent)
    state, loss = build_state(sharded.anatomy, job, mesh, steps=2), build_objective(sharded, job, plan, dataset)
    rows = read_rows(dataset, np.arange(4 * mesh.data_rank, 4 * mesh.data_rank + 4))
    batch = share_rows(rows, count=4, dataset=dataset, mesh=mesh)
    found = measure.measure_memory(
        state, loss, lambda: micro_batches(batch, 2, sharded.anatomy, mesh), divisor_of(loss, batch, mesh), mesh
    )
    return {term.name: term.bytes for term in plan.memory}, found


def default_job(kind: Kind, *, world: int) -> JobSpec:
    """Return a spec that keeps the default for activations, with two micro-batches in a step."""
    raw = _raw(kind, CASES["one rank, plain"])
    raw["model"].pop("gradient_checkpointing")
    raw["training"]["gradient_accumulation_steps"] = 2
    raw["scaling"] = {"num_workers": world}
    return parse(with_objective(raw, kind.family, kind.objective, kind.rows))


def unpacked_job(kind: Kind, *, world: int) -> JobSpec:
    """Return the same spec with its own code unpacked, if it has any."""
    job = default_job(kind, world=world)
    if job.code is None:
        return job
    package = read_package(job.code.package)
    unpack(package)
    return job.model_copy(update={"code": job.code.model_copy(update={"sha256": package.sha256})})


def shape_of(job: JobSpec) -> ModelShape:
    """Return the sizes from which `POST /jobs` plans a job."""
    shape, problems = check_model(job, may_read())
    assert problems == []
    assert shape is not None
    return shape if job.code is None else replace(shape, call=measure_call(job))
