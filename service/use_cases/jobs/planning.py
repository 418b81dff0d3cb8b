"""Checking and planning of a spec on the current cluster: its plans, or all rules that it breaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from service.domain.queue.admission import never_fits
from service.domain.queue.shrink import cannot_shrink
from service.errors import ClusterStarting, InvalidSpec
from service.ports import Cancellation, Cluster, Preflight, PreflightReport
from service.recent import Recent
from service.use_cases.jobs.first_view import FirstView
from service.use_cases.jobs.memory import memory_warnings, preparation_problem
from service.use_cases.jobs.outlook import DeviceQuestion, find_memory, find_outlook, hosts_of
from train_loop.plan import (
    UNKNOWN_END,
    Capacity,
    LargestRead,
    ModelShape,
    NodeRoom,
    Outlook,
    Plan,
    PlannedEnd,
    Preview,
    RankMemory,
    Resources,
    allows_size,
    check_schedule,
    choose_micro_batch,
    data_starves,
    device_problems,
    forgotten_gpu,
    lay_out,
    memory_problem,
    plan_job,
    plan_sizes,
    plans_that_fit,
    reservation_problem,
    reservations,
    shards_per_node,
    sized,
    why_gathers_cross,
    why_no_data_cpu,
    why_split,
)
from train_loop.run_dir import Parent, versions_here
from train_loop.spec import AUTO, NODE, AnyJobSpec, JobSpec, LoraSpec, Problem, SpecError, Spelling, with_lora

Plans = dict[int, Plan]
"""Plan for each possible number of workers of a job; at least one."""
NO_QUESTION = DeviceQuestion()
MicroBatchBy = Literal["spec", "memory", "workers"]
"""Source of the micro-batch of a plan: the spec; with `auto`, the known memory of a worker, or the least that fits."""


@dataclass(frozen=True)
class CheckedSpec:
    """The plans of a spec that passed all checks, and their warnings."""

    plans: Plans
    warnings: tuple[str, ...]
    memory: Mapping[int, int] = field(default_factory=dict)
    """Bytes of host memory that each worker reserves, by number of workers; empty if the cluster limits no worker."""
    code: str | None = None
    """SHA-256 of the package with own code that was checked."""
    lora: LoraSpec | None = None
    """Settings of the adapters in the folder that the spec names, if it names one."""


@dataclass(frozen=True, eq=False)
class _Checked:
    """The inputs of the plans of a spec."""

    spec: AnyJobSpec
    found: PreflightReport
    nodes: Sequence[NodeRoom]
    cluster: Capacity | None

    def equals(self, other: "_Checked") -> bool:
        """Return whether spec and result are the same objects, and the cluster is equal."""
        same = self.spec is other.spec and self.found is other.found
        return same and (self.nodes, self.cluster) == (other.nodes, other.cluster)


@dataclass(frozen=True)
class PlanView:
    """A plan, its layout on the cluster, and warnings."""

    spec: AnyJobSpec
    plan: Plan
    """The plan for the largest number of workers."""
    sizes: tuple[int, ...]
    """Possible numbers of workers of an elastic job; empty otherwise."""
    nodes: tuple[range, ...] | None
    """Ranks of each node; None if the cluster is unknown or too small."""
    warnings: tuple[str, ...]
    preview: tuple[Preview, ...] = ()
    """Counts of the first rows of each source."""
    end: PlannedEnd = UNKNOWN_END
    """The last optimizer step, and the setting that sets it, if they are known before the data is prepared."""
    spellings: tuple[Spelling, ...] = ()
    """Values that the text of the spec writes in another way, with their canonical form."""
    outlook: Outlook | None = None
    """Memory and throughput on a device; None if no device is named or known."""
    micro_batch_by: MicroBatchBy = "spec"


@dataclass(frozen=True)
class Planner:
    """Use case of checking and planning specs."""

    preflight: Preflight
    cluster: Cluster
    first_view: FirstView
    known: Recent[int, tuple[_Checked, CheckedSpec]] = field(default_factory=lambda: Recent(256))
    """Plans of the specs that were submitted last, by the identity of the spec, which an entry holds."""

    def resolved(self, spec: AnyJobSpec, question: DeviceQuestion = NO_QUESTION) -> AnyJobSpec:
        """Return a spec whose fsdp_size is a number: node becomes that of the cluster, or of hosts of a named device.

        Raises InvalidSpec, InvalidRequest, ClusterStarting.
        """
        if spec.strategy.fsdp_size != NODE:
            return spec
        scaling = spec.scaling.at(spec.scaling.bounds[1])
        nodes = self._nodes() if question.named is None else hosts_of(question.named, scaling)
        try:
            size = shards_per_node(spec.strategy, scaling, nodes)
        except ValueError as error:
            raise InvalidSpec([Problem("/strategy/fsdp_size", str(error))]) from error
        return spec.model_copy(update={"strategy": spec.strategy.model_copy(update={"fsdp_size": size})})

    def _nodes(self) -> Sequence[Resources]:
        """Return the nodes of the cluster; empty if it does not answer. Raises ClusterStarting."""
        cluster = self.cluster.capacity()
        if cluster is None and self.first_view.pending:
            raise ClusterStarting
        return cluster.nodes if cluster is not None else ()

    def check(self, spec: AnyJobSpec, parent: Parent | None = None) -> CheckedSpec:
        """Check data and model, and return the plans. Raises InvalidSpec, PreflightFailed."""
        found = self.preflight.check(spec, parent)
        if parent is None:
            return self._checked(spec, found, self.cluster.rooms())
        if spec.trains:
            # The remaining steps of a clone depend on its parent's checkpoint.
            found = replace(found, count=None)
        checked = self._checked(spec, found, self.cluster.rooms())
        warning = parent.manifest.other_torch(versions_here().get("torch"))
        return replace(checked, warnings=(*checked.warnings, *filter(None, [warning])))

    def cached(self, spec: AnyJobSpec) -> CheckedSpec | None:
        """Return the plans if a recent, cached check of data and model passed; None otherwise. Raises InvalidSpec.

        They are computed once for the same object, the same result of the check, and an unchanged cluster.
        """
        found = self.preflight.cached(spec)
        if found is None:
            return None
        nodes = self.cluster.rooms()
        question = _Checked(spec, found, nodes, self.cluster.capacity())
        known = self.known.get(id(spec))
        if known is None or not known[0].equals(question):
            known = question, self._checked(spec, found, nodes)
            self.known.put(id(spec), known)
        return known[1]

    def _checked(self, spec: AnyJobSpec, found: PreflightReport, nodes: Sequence[NodeRoom] | None) -> CheckedSpec:
        """Return the plans that break no rule, and fit the memory of the nodes unless they are None."""
        spec = with_lora(spec, found.lora)
        plans = self._plans(spec, found, nodes)
        notes, most = (note for source in found.preview for note in source.notes), max(plans)
        memory = [] if nodes is None else memory_warnings(spec.at(most), plans[most], found.largest, nodes)
        reserved = reservations(spec.run, plans, found.largest, nodes or ())
        of_cluster = self.cluster_warnings(spec, sizes_of(spec, plans))
        warnings = (*of_cluster, *plans[most].warnings, *memory, *found.notes, *notes)
        return CheckedSpec(plans, warnings, reserved, found.code, found.lora)

    def _plans(self, spec: AnyJobSpec, found: PreflightReport, nodes: Sequence[NodeRoom] | None) -> Plans:
        plans, broken = _planned(spec, found.shape)
        cluster = None if nodes is None else self.cluster.capacity()
        fewest = spec.scaling.at(min(plans, default=spec.scaling.bounds[0]))
        starves = data_starves(fewest, cluster.total if cluster else None)
        _, unfit = _schedule(spec, plans, found)
        problems = [*([starves] if starves else []), *device_problems(spec.run), *broken, *unfit, *found.problems]
        if problems or found.shape is None or not plans:
            raise InvalidSpec(problems)
        return _fitting(spec, plans, found.shape, found.largest, nodes or ())

    def view(
        self,
        spec: AnyJobSpec,
        parent: Parent | None = None,
        cancellation: Cancellation | None = None,
        question: DeviceQuestion = NO_QUESTION,
    ) -> PlanView:
        """Return the largest plan, laid out on the cluster's nodes, and its outlook on a device.

        A plan for a device that the caller names need not fit the memory of the cluster. Raises InvalidRequest,
        InvalidSpec, PreflightFailed, CallCancelled.
        """
        nodes = None if question.named is not None else self.cluster.rooms()
        found = self.preflight.check(spec, parent, cancellation)
        checked = self._checked(spec, found, nodes)
        spec, plans = with_lora(spec, found.lora), checked.plans
        plan, cluster, group = plans[max(plans)], self.cluster.capacity(), spec.strategy.peers
        whole = spec.strategy.whole_group
        scaling = spec.scaling.at(max(plans))
        ranks = lay_out(scaling, cluster.nodes, group=group, whole=whole) if cluster is not None else None
        placed = tuple(ranks.values()) if ranks else None
        end, _ = _schedule(spec, plans, found)
        memory = find_memory(question, spec.at(max(plans)), nodes or (), checked.memory.get(max(plans)))
        chosen, plan, by = _with_micro_batch(spec, plan, memory)
        outlook = find_outlook(question, chosen.at(max(plans)), plan, nodes or ())
        return PlanView(
            chosen,
            plan,
            sizes_of(spec, plans),
            placed,
            checked.warnings,
            found.preview,
            end,
            outlook=outlook,
            micro_batch_by=by,
        )

    def cluster_warnings(self, spec: AnyJobSpec, sizes: Sequence[int]) -> list[str]:
        """Return the warnings about a job on the nodes of the cluster.

        Such a job never starts, has peers on several nodes, uses none of the GPUs, lacks CPUs for its data, or
        is elastic and cannot shrink. `sizes` are the possible numbers of workers of an elastic job.
        """
        fewest, most = (min(sizes), max(sizes)) if sizes else spec.scaling.bounds
        cluster, group = self.cluster.capacity(), spec.strategy.peers
        never = never_fits(spec.scaling.at(fewest), cluster, group=group)
        split = _split(spec.at(most), cluster)
        starves = why_no_data_cpu(spec.scaling.at(most), cluster.nodes, group=group) if cluster is not None else None
        stuck = cannot_shrink(spec.scaling, spec.strategy, tuple(sizes), cluster) if sizes else None
        idle = forgotten_gpu(spec.scaling, cluster.total) if cluster is not None else None
        return [
            *([f"the job would stay QUEUED: {never}"] if never else []),
            *filter(None, (*split, starves, idle, stuck)),
        ]


def _fitting(
    spec: AnyJobSpec, plans: Plans, shape: ModelShape, largest: LargestRead | None, nodes: Sequence[NodeRoom]
) -> Plans:
    """Return the plans that fit the memory of nodes. Raises InvalidSpec if none does."""
    lacks = (
        memory_problem(spec, plans, shape, nodes) or reservation_problem(spec.run, plans, nodes),
        preparation_problem(spec.run, largest, nodes),
    )
    if problems := list(filter(None, lacks)):
        raise InvalidSpec(problems)
    return plans_that_fit(spec, plans, nodes)


def _split(spec: AnyJobSpec, cluster: Capacity | None) -> list[str | None]:
    """Return why groups that exchange in each layer cross nodes: peers, experts, shards; None if none of a kind does.

    A layout keeps peers on one node, and shard groups smaller than the job, if any layout does.
    """
    if cluster is None:
        return []
    strategy, scaling, nodes, allows = spec.strategy, spec.scaling, cluster.nodes, partial(allows_size, spec.run)
    whole = strategy.whole_group
    split = partial(why_split, scaling, nodes, allows=allows, whole=whole)
    return [
        split(group=strategy.peers, name=strategy.name_of_peers),
        split(group=strategy.ep_size, name="ep_size", peers=strategy.peers),
        why_gathers_cross(strategy, scaling, nodes),
    ]


def _with_micro_batch(spec: AnyJobSpec, plan: Plan, memory: RankMemory | None) -> tuple[AnyJobSpec, Plan, MicroBatchBy]:
    """Return spec and plan with the micro-batch that workers with this memory choose, and the reason."""
    if not isinstance(spec, JobSpec) or spec.training.per_device_train_batch_size != AUTO:
        return spec, plan, "spec"
    if memory is None:
        return spec, plan, "workers"
    there = spec.at(plan.mesh.world)
    size = choose_micro_batch(there, plan.shape, memory, before=None).size
    return sized(spec, size), plan_job(sized(there, size), plan.shape), "memory"


def sizes_of(spec: AnyJobSpec, plans: Plans) -> tuple[int, ...]:
    """Return the possible numbers of workers of an elastic job; empty otherwise."""
    return tuple(plans) if spec.scaling.elastic else ()


def _schedule(spec: AnyJobSpec, plans: Plans, found: PreflightReport) -> tuple[PlannedEnd, list[Problem]]:
    """Return the known end of a job, and the problems of its schedule."""
    if not plans:
        return UNKNOWN_END, []
    return check_schedule(spec.run.training, found.count, global_batch=plans[max(plans)].batch.global_batch)


def _planned(spec: AnyJobSpec, shape: ModelShape | None) -> tuple[Plans, list[Problem]]:
    """Return the plans for a model of known shape, or the broken rules."""
    try:
        return (plan_sizes(spec, shape) if shape else {}), []
    except SpecError as error:
        return {}, error.problems
