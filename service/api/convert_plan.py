"""Conversion of plans to response models."""

from dataclasses import asdict

from service.api.schemas import (
    ChoicesOut,
    DeviceOut,
    Float8Out,
    MemoryOut,
    MemoryTermOut,
    MeshOut,
    OutlookOut,
    PlanOut,
    PreviewOut,
    RangeOut,
    ReductionTreeOut,
    SpellingOut,
    StepPartOut,
    SuggestionOut,
    UnitOut,
)
from service.use_cases.jobs.planning import PlanView
from train_loop.plan import (
    DEVICE_SOURCES,
    Device,
    Float8Linears,
    Outlook,
    Plan,
    Range,
    ReductionTree,
    Suggestion,
    allowed_workers,
    needs_units,
    planned_choices,
)
from train_loop.spec import AnyJobSpec, JobSpec


def plan_out(view: PlanView) -> PlanOut:
    """Return the plan of a job spec."""
    spec, plan, run = view.spec, view.plan, view.spec.run
    terms = [MemoryTermOut(**asdict(term)) for term in plan.memory]
    return PlanOut(
        name=spec.name,
        world=plan.mesh.world,
        sizes=list(view.sizes),
        mesh=MeshOut.model_validate(plan.mesh, from_attributes=True),
        reduction_tree=None if plan.tree is None else _reduction_tree(run, plan.tree),
        nodes=None if view.nodes is None else [list(ranks) for ranks in view.nodes],
        data_parallel_size=plan.mesh.dp,
        global_batch_size=plan.batch.global_batch,
        micro_batch_size=plan.batch.per_device,
        micro_batch_by=view.micro_batch_by,
        gradient_accumulation_steps=plan.batch.accumulation,
        tokens_per_step=_tokens_per_step(spec, plan),
        steps=view.end.steps,
        ends_by=view.end.by,
        parameters=plan.shape.parameters,
        trained_parameters=plan.shape.trained,
        active_parameters=plan.shape.active,
        flops_per_row=plan.shape.call.flops_per_row if plan.shape.call else None,
        memory=MemoryOut(total_bytes=plan.memory_bytes, host_bytes=plan.host_memory_bytes, terms=terms),
        checkpoint_bytes=plan.checkpoint_bytes if spec.trains else 0,
        choices=_choices(view.spec, plan),
        outlook=None if view.outlook is None else _outlook(view.outlook, run),
        preview=[PreviewOut.model_validate(source, from_attributes=True) for source in view.preview],
        spellings=[SpellingOut.model_validate(one, from_attributes=True) for one in view.spellings],
        warnings=list(view.warnings),
    )


def _tokens_per_step(spec: AnyJobSpec, plan: Plan) -> int | None:
    if spec.data.has_own_columns:
        return None
    return plan.batch.global_batch * spec.data.sequences * spec.data.sequence_length


def _reduction_tree(spec: JobSpec, tree: ReductionTree) -> ReductionTreeOut:
    return ReductionTreeOut(
        max_shards=tree.max_shards,
        max_replicas=tree.max_replicas,
        micro_batches=tree.leaves,
        allowed_workers=allowed_workers(spec, tree),
    )


def _choices(spec: AnyJobSpec, plan: Plan) -> ChoicesOut:
    found, built, is_mixture = planned_choices(spec.run, plan), plan.shape.built, plan.shape.active is not None
    units, tree = (None, None) if built is None else (built.units, built.tree)
    if not needs_units(spec.run, plan.mesh, is_mixture=is_mixture):
        units, tree = (), None
    return ChoicesOut(
        units=None if units is None else [UnitOut.model_validate(one, from_attributes=True) for one in units],
        tree=tree,
        dtypes=dict(found.dtypes),
        attention=found.attention,
        loss_chunk_tokens=found.loss_chunk_tokens,
        checkpointing=found.checkpointing,
        optimizer_groups=[dict(group) for group in found.optimizer_groups] if spec.trains else [],
        cores=found.cores,
        backend=found.backend,
        float8=_float8(found.float8),
    )


def _float8(found: Float8Linears | None) -> Float8Out | None:
    if found is None:
        return None
    return Float8Out.model_validate(
        {"scaling": found.scaling, "linears": len(found.names), "left_out": [*found.left_out]}
    )


def _outlook(outlook: Outlook, spec: JobSpec) -> OutlookOut:
    fit, speed, found = outlook.fit, outlook.throughput, outlook.suggestions
    return OutlookOut(
        device=_device(outlook.device, spec),
        verdict=fit.verdict,
        needed_bytes=fit.needed,
        step_seconds=None if speed is None else _range(speed.step_seconds),
        tokens_per_second=None if speed is None else _range(speed.tokens_per_second),
        parts=[StepPartOut(name=one.name, seconds=_range(one.seconds)) for one in (speed.parts if speed else ())],
        assumptions=list(speed.assumptions) if speed else [],
        no_throughput=outlook.no_throughput,
        largest_micro_batch=outlook.largest_micro_batch,
        suggestions=None if found is None else [_suggestion(one) for one in found],
    )


def _device(device: Device, spec: JobSpec) -> DeviceOut:
    return DeviceOut(
        name=device.name,
        title=device.title,
        memory_bytes=device.memory,
        memory_bytes_per_second=device.bandwidth,
        flops=device.peak(spec.strategy.param_dtype),
        link_bytes_per_second=device.link,
        network_bytes_per_second=device.network,
        gpus_per_host=device.domain,
        source=DEVICE_SOURCES,
    )


def _suggestion(found: Suggestion) -> SuggestionOut:
    speed = found.throughput
    return SuggestionOut(
        change=str(found),
        overrides={part: dict(fields) for part, fields in found.patch.items() if fields},
        workers=found.workers,
        needed_bytes=found.fit.needed,
        tokens_per_second=None if speed is None else _range(speed.tokens_per_second),
        changes_results=found.changes_results,
    )


def _range(found: Range) -> RangeOut:
    return RangeOut(least=found.least, most=found.most)
