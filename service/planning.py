"""What a spec comes to on the cluster that there is: its plans, or every rule that it breaks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.domain.admission import never_fits
from service.domain.shrink import cannot_shrink
from service.errors import InvalidSpec
from service.ports import Cluster, Findings, Preflight
from train_loop.plan import (
    ModelShape,
    Plan,
    Preview,
    check_schedule,
    data_starves,
    device_problems,
    forgotten_gpu,
    lay_out,
    plan_sizes,
    why_no_data_cpu,
    why_split,
)
from train_loop.run_dir import Parent
from train_loop.spec import JobSpec, Problem, SpecError

Plans = dict[int, Plan]
"""By each number of workers that a job can have; at least one."""


@dataclass(frozen=True)
class PlanView:
    """A plan with what the cluster adds."""

    spec: JobSpec
    plan: Plan
    """At the most workers that it can have."""
    sizes: tuple[int, ...]
    """Of an elastic job: the numbers of workers that it can run with."""
    nodes: tuple[range, ...] | None
    """The ranks that would share a node; None where that is not known, or where they have no place."""
    warnings: tuple[str, ...]
    preview: tuple[Preview, ...] = ()
    """Counts of the first rows of each source of text."""
    steps: int | None = None
    """Optimizer steps of the run, if they are known before the data is prepared."""


@dataclass(frozen=True)
class Planner:
    """Checks specs, over the ports that it needs."""

    preflight: Preflight
    cluster: Cluster

    def check(self, spec: JobSpec, parent: Parent | None = None) -> Plans:
        """The plans, after a look at data and model. Raises InvalidSpec, PreflightFailed."""
        found = self.preflight.check(spec, parent)
        # A clone's steps depend on where its parent stands.
        return self._plans(spec, found if parent is None else replace(found, count=None))

    def known(self, spec: JobSpec) -> Plans | None:
        """The plans, if data and model were found in order a moment ago. Raises InvalidSpec."""
        found = self.preflight.known(spec)
        return None if found is None else self._plans(spec, found)

    def _plans(self, spec: JobSpec, found: Findings) -> Plans:
        plans, broken = _planned(spec, found.shape)
        cluster = self.cluster.capacity()
        fewest = spec.scaling.at(min(plans, default=spec.scaling.bounds[0]))
        starves = data_starves(fewest, cluster.total if cluster else None)
        _, unfit = _schedule(spec, plans, found)
        problems = [*([starves] if starves else []), *device_problems(spec.scaling), *broken, *unfit, *found.problems]
        if problems or not plans:
            raise InvalidSpec(problems)
        return plans

    def view(self, spec: JobSpec) -> PlanView:
        """The largest plan, laid out over the nodes that there are. Raises as `check`."""
        found = self.preflight.check(spec, None)
        plans = self._plans(spec, found)
        plan, cluster, group = plans[max(plans)], self.cluster.capacity(), spec.strategy.ulysses_size
        ranks = lay_out(spec.scaling.at(max(plans)), cluster.nodes, group=group) if cluster is not None else None
        nodes = tuple(ranks.values()) if ranks else None
        notes = [note for source in found.preview for note in source.notes]
        warnings = [*plan.warnings, *self.warnings(spec, sizes_of(spec, plans)), *notes]
        steps, _ = _schedule(spec, plans, found)
        return PlanView(spec, plan, sizes_of(spec, plans), nodes, tuple(warnings), found.preview, steps)

    def warnings(self, spec: JobSpec, sizes: Sequence[int]) -> list[str]:
        """Return what the nodes of the cluster mean for a job.

        It never starts, its Ulysses groups cross nodes, it asks for none of their GPUs, or it is elastic and cannot
        shrink. `sizes` are the numbers of workers that an elastic job can run with.
        """
        fewest, most = (min(sizes), max(sizes)) if sizes else spec.scaling.bounds
        cluster, group = self.cluster.capacity(), spec.strategy.ulysses_size
        never = never_fits(spec.scaling.at(fewest), cluster, group=group)
        split = why_split(spec.scaling.at(most), cluster.nodes, group=group) if cluster is not None else None
        starves = why_no_data_cpu(spec.scaling.at(most), cluster.nodes, group=group) if cluster is not None else None
        stuck = cannot_shrink(spec.scaling, tuple(sizes), cluster) if sizes else None
        idle = forgotten_gpu(spec.scaling, cluster.total) if cluster is not None else None
        return [
            *([f"the job would stay QUEUED: {never}"] if never else []),
            *filter(None, (split, starves, idle, stuck)),
        ]


def sizes_of(spec: JobSpec, plans: Plans) -> tuple[int, ...]:
    """The numbers of workers that an elastic job can run with."""
    return tuple(plans) if spec.scaling.elastic else ()


def _schedule(spec: JobSpec, plans: Plans, found: Findings) -> tuple[int | None, list[Problem]]:
    """Return the steps of a job, as far as its data tells, and what is wrong with its schedule then."""
    if not plans or found.count is None:
        return spec.training.max_steps, []
    return check_schedule(spec.training, found.count, global_batch=plans[max(plans)].batch.global_batch)


def _planned(spec: JobSpec, shape: ModelShape | None) -> tuple[Plans, list[Problem]]:
    """The plans for a model of known sizes, or the rules that the spec breaks."""
    try:
        return (plan_sizes(spec, shape) if shape else {}), []
    except SpecError as error:
        return {}, error.problems
