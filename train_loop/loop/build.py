"""Assembly of a training run: builds model, data order, optimizers and objective from a spec and a session."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.amp import GradScaler

from train_loop.checkpoint.optimizer_state import check_fits, read_optimizer_state, trained_shapes
from train_loop.checkpoint.restore import AT_START, Origins
from train_loop.code.use import own_code
from train_loop.data.dataset import Dataset
from train_loop.data.order import Order, StepOrder
from train_loop.loop.fake_call import count_row_flops
from train_loop.loop.objectives.labels import ClassLoss, NumberLoss
from train_loop.loop.objectives.objective import Objective, check_objective
from train_loop.loop.objectives.own_loss import OwnLoss
from train_loop.loop.objectives.pairs import ContrastiveLoss, RewardLoss
from train_loop.loop.objectives.routed import RoutedLoss, RouterRule
from train_loop.loop.objectives.routed_tokens import RoutedTokens
from train_loop.loop.objectives.token_cross_entropy import LossRule, MaskedLoss, TokenLoss
from train_loop.loop.objectives.vocabulary import VocabularyPart
from train_loop.loop.reduction import Reduction, build_reduction
from train_loop.loop.session import Session
from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.float8 import update_scales
from train_loop.model.folder import model_shape
from train_loop.model.quantize import count_values
from train_loop.optim import Ema, ExpertBalance, Place, build_optimizers, build_scheduler, time_optimizers
from train_loop.parallel.build import ShardedModel, build_sharded
from train_loop.parallel.mesh import Mesh, build_mesh, local_device
from train_loop.plan import (
    START,
    End,
    Float8Linears,
    Origin,
    Plan,
    chunk_rows,
    plan_end,
    plan_job,
    plan_samples,
    plan_steps,
)
from train_loop.run_dir import Manifest, Parent, storage_failed
from train_loop.spec import JobSpec
from train_loop.state import TrainState
from train_loop.system.retry import patiently
from train_loop.telemetry.compile import CompileWatch
from train_loop.telemetry.flops import Flops, RowFlops
from train_loop.telemetry.timers import ComputeTimer

_SCALE = 2.0**16
"""Initial factor of losses in fp16 runs."""


@dataclass(frozen=True)
class Run:
    """Objects of the training loop on this rank. The loop passes to each of its parts only what the part needs."""

    spec: JobSpec
    session: Session
    mesh: Mesh
    dataset: Dataset
    order: StepOrder
    steps: int
    """Optimizer steps of the whole run; an estimate if max_tokens ends it."""
    state: TrainState
    objective: Objective
    reduction: Reduction
    flops: Flops | RowFlops
    ends_by: End
    """The setting that ends the run."""
    compute_timer: ComputeTimer
    compile_watch: CompileWatch | None
    """Counters of torch.compile; None if model.compile is off."""
    evaluation_data: Dataset | None = None
    """Data for evaluation; None without eval data."""
    origins: Origins = AT_START
    """States from which this run starts."""
    float8: Float8Linears | None = None
    """Linear modules that compute in float8; None without `strategy.float8`."""

    @property
    def done(self) -> bool:
        """Return whether the run has reached its last step or max_tokens."""
        limit = self.spec.training.max_tokens
        reached = limit is not None and self.state.tokens >= limit
        return reached or not self.order.steps_left(self.state.consumed)


def build_run(
    spec: JobSpec,
    session: Session,
    dataset: Dataset,
    evaluation: Dataset | None = None,
    newest: Manifest | None = None,
) -> Run:
    """Build all objects of a run in their state at its start. A collective call; raises UserError.

    `newest` is the checkpoint that replaces that state: then weights are neither drawn nor read from a folder, unless
    they are those below adapters.
    """
    plan = plan_job(spec, model_shape(spec.model))
    wholes = bool(spec.strategy.ignored_params)
    mesh = build_mesh(plan.mesh, local_device(session.local_rank), timeout=session.timeout, wholes=wholes)
    parent = patiently(session.run_dir.parent, seconds=session.patience, may_pass=storage_failed)
    sharded = build_sharded(spec, mesh, needs_weights=newest is None and parent is None)
    report_unused(sharded, spec, session)
    optimizer_state = None if parent is not None else read_optimizer_state(spec.training)
    if optimizer_state is not None:
        check_fits(optimizer_state, spec.training, trained_shapes(sharded.model))
    origin = _origin(parent, dataset) if optimizer_state is None else optimizer_state.origin(spec.data, dataset)
    steps = plan_steps(
        spec.training,
        samples=dataset.epoch_samples,
        tokens=dataset.epoch_tokens,
        global_batch=plan.batch.global_batch,
        origin=origin,
    )
    state = build_state(sharded.anatomy, spec, mesh, steps=steps)
    state.consumed = origin.consumed
    state.base = sharded.base
    time_optimizers(state.optimizers, sharded.timer)
    objective = route(build_objective(sharded, spec, plan, dataset), spec, mesh)
    check_objective(objective, [column.name for column in dataset.columns])
    state.balance = build_balance(objective, spec)
    return Run(
        spec=spec,
        session=session,
        mesh=mesh,
        dataset=dataset,
        order=_order(spec, plan, dataset, origin),
        steps=steps,
        state=state,
        objective=objective,
        reduction=_reduction(sharded, spec, plan, mesh),
        flops=_flops(sharded.anatomy, spec, dataset, mesh.device),
        ends_by=plan_end(
            spec.training, samples=dataset.epoch_samples, global_batch=plan.batch.global_batch, origin=origin
        ),
        compute_timer=sharded.timer,
        compile_watch=CompileWatch() if spec.model.compile else None,
        evaluation_data=evaluation,
        origins=Origins(newest, parent, optimizer_state),
        float8=sharded.float8,
    )


def _reduction(sharded: ShardedModel, spec: JobSpec, plan: Plan, mesh: Mesh) -> Reduction:
    own, once = spec.code is not None, spec.strategy.gradient_sync == "last"
    return build_reduction(sharded.model, plan.tree, mesh, seed=spec.training.seed, own=own, once=once)


def report_unused(sharded: ShardedModel, spec: JobSpec, session: Session) -> None:
    """Report stored tensors and settings that the model does not use."""
    if sharded.unused:
        first, count = sharded.unused[0], len(sharded.unused)
        session.journal.warn(f"{spec.model.path}: the model does not use {count} stored tensors, for example {first}")
    if spec.strategy.apply_expert_patch:
        session.journal.event("expert_patch_not_needed", reason=_why_no_patch(sharded.anatomy, spec))


def _why_no_patch(anatomy: Anatomy, spec: JobSpec) -> str:
    if spec.code is not None:
        return "ranks add zeros for parameters of own code that their rows have not used"
    if anatomy.experts is None:
        return "the model has no experts"
    return "all experts of a layer are one tensor, so that those without tokens have gradients of zero"


def _flops(anatomy: Anatomy, spec: JobSpec, dataset: Dataset, device: torch.device) -> Flops | RowFlops:
    """Return the FLOPs of a token, or of a row of own code, on a device."""
    name, dtype = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", spec.strategy.param_dtype
    if spec.code is None:
        return count_flops(anatomy, sequence_length=dataset.sequence_length, dtype=dtype, device=name)
    unknown = RowFlops(None, name, dtype)
    # The call may take seconds, and has no use without a peak.
    return unknown if unknown.peak is None else replace(unknown, per_row=count_row_flops(spec, dataset))


def count_flops(anatomy: Anatomy, *, sequence_length: int, dtype: str, device: str) -> Flops:
    """Return the FLOPs of a model on a device. A sharded model counts with all parameters that a token uses."""
    experts = anatomy.experts
    idle = 0 if experts is None else experts.idle
    trains_experts = experts is not None and any(p.requires_grad for one in experts.modules for p in one.parameters())
    frozen = count_values(anatomy.model, frozen=True)
    return Flops(
        parameters=count_values(anatomy.model) - idle,
        frozen=max(frozen - (0 if trains_experts else idle), 0),
        layers=anatomy.depth,
        attention_width=anatomy.attention_width,
        sequence_length=sequence_length,
        device=device,
        dtype=dtype,
    )


def build_objective(sharded: ShardedModel, spec: JobSpec, plan: Plan, dataset: Dataset) -> Objective:
    """Build the objective of a run: the loss of own code, of labels, of pairs, or token cross entropy."""
    head = spec.model.label_head
    if spec.code is not None:
        return OwnLoss(sharded.anatomy, own_code(spec.code), dataset)
    if head is None:
        return build_token_loss(sharded, spec, plan)
    if head.reward is not None:
        return RewardLoss(sharded.anatomy, center=head.reward.center_rewards_coefficient)
    if head.embedding is not None:
        return ContrastiveLoss(sharded.anatomy, head.embedding)
    if head.classes is None:
        return NumberLoss(sharded.anatomy)
    return ClassLoss(sharded.anatomy, pools=head.pools, label_smoothing=spec.training.label_smoothing_factor)


def route(objective: Objective, spec: JobSpec, mesh: Mesh) -> Objective:
    """Return an objective with the losses of routers, if its model has experts."""
    experts = objective.anatomy.experts
    if experts is None:
        return objective
    tokens = RoutedTokens(mesh, is_split=spec.strategy.sequence_parallel)
    return RoutedLoss(objective, experts, RouterRule.of(spec.training, experts), tokens)


def build_balance(objective: Objective, spec: JobSpec) -> ExpertBalance | None:
    """Return the balance of experts by biases that a spec asks for; it takes the loads that the objective counts."""
    rate, experts = spec.model.router_bias_update, objective.anatomy.experts
    if rate is None or experts is None or not isinstance(objective, RoutedLoss):
        return None
    return ExpertBalance(rate, experts.balanced, objective.watch.sum_loads)


def build_token_loss(sharded: ShardedModel, spec: JobSpec, plan: Plan) -> TokenLoss:
    """Build the objective of language models: token cross entropy, of the next or of masked tokens.

    It is computed in chunks if the plan asks for them and the steps after the model's head are known.
    """
    tokens = spec.training.micro_batch * spec.data.sequence_length // plan.mesh.sp
    shape = plan.shape.shared(tp=plan.mesh.tp)
    rows = chunk_rows(spec, shape, tokens=tokens) if sharded.after_head is not None else None
    vocabulary = None
    if sharded.sharers is not None:
        # The model would gather all logits of each token on every rank.
        vocabulary = VocabularyPart(sharded.sharers, sharded.anatomy.outputs, sharded.timer)
    rule = LossRule(
        spec.training.label_smoothing_factor,
        spec.training.z_loss,
        in_order=plan.tree is not None,
        vocabulary=vocabulary,
        output_dtype=None if spec.strategy.output_dtype is None else DTYPES[spec.strategy.output_dtype],
    )
    kind = TokenLoss if spec.model.masked is None else MaskedLoss
    return kind(sharded.anatomy, rule, chunk_rows=rows, after_head=sharded.after_head or ())


def build_state(anatomy: Anatomy, spec: JobSpec, mesh: Mesh, *, steps: int) -> TrainState:
    """Build optimizers, schedules over `steps` steps, gradient scaler and EMA for a model with loaded weights."""
    training = spec.training
    pin = spec.strategy.pin_memory and mesh.device.type == "cuda"
    place = Place(on_host=spec.strategy.offload_policy == "optimizer", pin_memory=pin)
    optimizers = build_optimizers(anatomy, training, place)
    schedulers = tuple(build_scheduler(optimizer, training, steps=steps) for optimizer in optimizers)
    scaler = GradScaler(mesh.device.type, init_scale=_initial_scale(spec, mesh), enabled=spec.model.dtype == "fp16")
    average = Ema(anatomy.model, training.ema_decay) if training.ema_decay is not None else None
    scales = partial(update_scales, anatomy.model) if spec.strategy.float8 == "tensorwise" else None
    return TrainState(anatomy.model, optimizers, schedulers, scaler, average, update_scales=scales)


def _initial_scale(spec: JobSpec, mesh: Mesh) -> float:
    """Return torch's default; for own code, whose sums are divided after backward, that for a sum over rows."""
    if spec.code is None:
        return _SCALE
    rows = spec.training.global_batch_size or spec.training.micro_batch * mesh.plan.dp
    return _SCALE / 2.0 ** rows.bit_length()


def _origin(parent: Parent | None, dataset: Dataset) -> Origin:
    """Return the run's start. Steps and tokens continue the parent's counts; new data or order starts at sample 0."""
    if parent is None:
        return START
    manifest = parent.manifest
    known = parent.same_order and manifest.dataset == dataset.fingerprint
    consumed = manifest.position.epoch * dataset.epoch_samples + manifest.position.samples if known else 0
    return Origin(manifest.step, manifest.tokens, consumed)


def _order(spec: JobSpec, plan: Plan, dataset: Dataset, origin: Origin) -> StepOrder:
    samples, batch = dataset.epoch_samples, plan.batch
    end = plan_samples(spec.training, samples=samples, global_batch=batch.global_batch, origin=origin)
    order = Order(samples, spec.data.seed, spec.data.shuffle, dataset.fingerprint, end, dataset.mixture)
    if plan.tree is None:
        return StepOrder(order, batch.dp, batch.per_data_rank)
    return StepOrder(order, batch.dp, batch.per_data_rank, batch.per_device, plan.mesh.ddp)
