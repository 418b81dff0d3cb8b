"""A spec and a session → everything that the loop works with."""

import copy
from dataclasses import dataclass

from train_loop.data.dataset import Dataset
from train_loop.data.order import Order, StepOrder
from train_loop.ema import Ema
from train_loop.journal import Journal
from train_loop.model.build import build_model, materialise
from train_loop.model.freeze import freeze
from train_loop.optim import build_optimizers
from train_loop.parallel.mesh import Mesh, build_mesh, local_device
from train_loop.parallel.shard import parallelize
from train_loop.parallel.ulysses import Ulysses
from train_loop.plan import BatchPlan, plan_job, plan_samples, plan_steps
from train_loop.schedule import build_scheduler
from train_loop.session import Session
from train_loop.spec import JobSpec
from train_loop.state import TrainState


@dataclass(frozen=True)
class Run:
    """What the loop works with on this rank."""

    spec: JobSpec
    session: Session
    mesh: Mesh
    batch: BatchPlan
    dataset: Dataset
    order: StepOrder
    steps: int
    state: TrainState
    ulysses: Ulysses | None
    journal: Journal


def build_run(spec: JobSpec, session: Session, dataset: Dataset) -> Run:
    """Meta model → Ulysses → FSDP2 → weights → optimizer: each needs the one before. A collective call."""
    plan = plan_job(spec)
    mesh = build_mesh(plan.mesh, local_device(session.local_rank), timeout=session.timeout)
    model = build_model(spec.model)
    freeze(model, spec.model.freeze_module_prefix)
    blueprint = copy.deepcopy(model)
    ulysses = parallelize(model, mesh, spec)
    materialise(model, blueprint, seed=spec.training.seed, device=mesh.device)
    optimizers = build_optimizers(model, spec.training)

    steps = plan_steps(spec.training, samples=dataset.samples, global_batch=plan.batch.global_batch)
    schedulers = tuple(build_scheduler(optimizer, spec.training, steps=steps) for optimizer in optimizers)
    decay = spec.training.ema_decay
    return Run(
        spec=spec,
        session=session,
        mesh=mesh,
        batch=plan.batch,
        dataset=dataset,
        order=_order(spec, plan.batch, dataset),
        steps=steps,
        state=TrainState(model, optimizers, schedulers, Ema(model, decay) if decay is not None else None),
        ulysses=ulysses,
        journal=Journal(session.run_dir.attempt(session.attempt), rank=session.rank),
    )


def _order(spec: JobSpec, batch: BatchPlan, dataset: Dataset) -> StepOrder:
    end = plan_samples(spec.training, samples=dataset.samples, global_batch=batch.global_batch)
    order = Order(dataset.samples, spec.data.seed, spec.data.shuffle, dataset.fingerprint, end)
    return StepOrder(order, batch.dp, batch.per_data_rank)
