"""A spec and a session → everything that the loop works with."""

import copy
from dataclasses import dataclass

from train_loop.data.dataset import Dataset
from train_loop.data.order import Order, StepOrder
from train_loop.flops import Flops, count_flops
from train_loop.journal import Journal
from train_loop.model.build import build_model, materialise
from train_loop.optim import build_optimizer, build_scheduler
from train_loop.parallel.mesh import Mesh, build_mesh, local_device
from train_loop.parallel.shard import parallelize
from train_loop.parallel.ulysses import Ulysses
from train_loop.plan import BatchPlan, plan_job, plan_samples, plan_steps
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
    flops: Flops
    journal: Journal


def build_run(spec: JobSpec, session: Session, dataset: Dataset) -> Run:
    """Meta model → Ulysses → FSDP2 → weights → optimizer: each needs the one before. A collective call."""
    plan = plan_job(spec)
    mesh = build_mesh(plan.mesh, local_device(session.local_rank), timeout=session.timeout)
    model = build_model(spec.model)
    blueprint = copy.deepcopy(model)
    ulysses = parallelize(model, mesh, spec)
    materialise(model, blueprint, seed=spec.training.seed, device=mesh.device)
    optimizer = build_optimizer(model, spec.training)

    steps = plan_steps(spec.training, samples=dataset.samples, global_batch=plan.batch.global_batch)
    scheduler = build_scheduler(optimizer, spec.training, steps=steps)
    return Run(
        spec=spec,
        session=session,
        mesh=mesh,
        batch=plan.batch,
        dataset=dataset,
        order=_order(spec, plan.batch, dataset),
        steps=steps,
        state=TrainState(model, optimizer, scheduler),
        ulysses=ulysses,
        flops=count_flops(
            model,
            sequence_length=dataset.sequence_length,
            dtype=spec.strategy.param_dtype,
            device=mesh.device,
        ),
        journal=Journal(session.run_dir.attempt(session.attempt), rank=session.rank),
    )


def _order(spec: JobSpec, batch: BatchPlan, dataset: Dataset) -> StepOrder:
    end = plan_samples(spec.training, samples=dataset.samples, global_batch=batch.global_batch)
    order = Order(dataset.samples, spec.data.seed, spec.data.shuffle, dataset.fingerprint, end)
    return StepOrder(order, batch.dp, batch.per_data_rank)
