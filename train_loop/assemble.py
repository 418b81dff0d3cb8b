"""A spec and a session → everything that the loop works with."""

import copy
from dataclasses import dataclass

import torch
from torch.amp import GradScaler
from transformers import PreTrainedModel

from train_loop.data.dataset import Dataset
from train_loop.data.order import Order, StepOrder
from train_loop.journal import Journal
from train_loop.loss import LossRule, TokenLoss
from train_loop.model.attention import apply_attention
from train_loop.model.build import build_model
from train_loop.model.load import give_weights
from train_loop.model.probe import check_attention, check_head, probe
from train_loop.model_folder import model_shape
from train_loop.optim import build_optimizer, build_scheduler
from train_loop.parallel.mesh import Mesh, build_mesh, local_device
from train_loop.parallel.shard import parallelize, place_buffers
from train_loop.parallel.ulysses import Ulysses
from train_loop.plan import BatchPlan, Plan, chunk_rows, plan_job, plan_samples, plan_steps
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
    """Optimizer steps of the whole run; an estimate where it ends by tokens."""
    state: TrainState
    loss: TokenLoss
    ulysses: Ulysses | None
    journal: Journal
    evaluation: Dataset | None = None
    """What the run is evaluated on."""

    @property
    def done(self) -> bool:
        """Whether the run has trained all that it is to train."""
        limit = self.spec.training.max_tokens
        reached = limit is not None and self.state.tokens >= limit
        return reached or not self.order.steps_left(self.state.consumed)


def build_run(spec: JobSpec, session: Session, dataset: Dataset, evaluation: Dataset | None = None) -> Run:
    """Meta model → Ulysses → FSDP2 → weights → optimizer: each needs the one before. A collective call."""
    plan = plan_job(spec, model_shape(spec.model))
    mesh = build_mesh(plan.mesh, local_device(session.local_rank), timeout=session.timeout)
    model = build_model(spec.model)
    seen = probe(model)
    check_attention(seen, spec)
    check_head(seen, spec)
    apply_attention(model, spec, mesh.device)
    blueprint = copy.deepcopy(model)
    ulysses = parallelize(model, mesh, spec)
    home = torch.device("cpu") if spec.strategy.offload_policy else mesh.device
    give_weights(model, blueprint, spec.model, seed=spec.training.seed, device=home)
    place_buffers(model, mesh.device)
    optimizer = build_optimizer(model, spec.training)

    tokens = dataset.tokens or dataset.samples * dataset.sequence_length
    steps = plan_steps(spec.training, samples=dataset.samples, tokens=tokens, global_batch=plan.batch.global_batch)
    scheduler = build_scheduler(optimizer, spec.training, steps=steps)
    return Run(
        spec=spec,
        session=session,
        mesh=mesh,
        batch=plan.batch,
        dataset=dataset,
        order=_order(spec, plan.batch, dataset),
        steps=steps,
        state=TrainState(model, optimizer, scheduler, GradScaler(mesh.device.type, enabled=spec.model.dtype == "fp16")),
        loss=build_loss(model, spec, plan, head_is_last=seen.head_is_last),
        ulysses=ulysses,
        journal=Journal(session.run_dir.attempt(session.attempt), rank=session.rank),
        evaluation=evaluation,
    )


def build_loss(model: PreTrainedModel, spec: JobSpec, plan: Plan, *, head_is_last: bool) -> TokenLoss:
    """The loss of a spec, in chunks where the plan says so and the model's head allows it."""
    tokens = spec.training.per_device_train_batch_size * spec.data.sequence_length // plan.mesh.sp
    rows = chunk_rows(spec, plan.shape, tokens=tokens) if head_is_last else None
    rule = LossRule(spec.training.label_smoothing_factor, spec.training.z_loss)
    return TokenLoss(model, rule, chunk_rows=rows)


def _order(spec: JobSpec, batch: BatchPlan, dataset: Dataset) -> StepOrder:
    end = plan_samples(spec.training, samples=dataset.samples, global_batch=batch.global_batch)
    order = Order(dataset.samples, spec.data.seed, spec.data.shuffle, dataset.fingerprint, end)
    return StepOrder(order, batch.dp, batch.per_data_rank)
