"""What a spec comes to on the cluster that there is: its plans, or every rule that it breaks."""

from dataclasses import dataclass

from service.domain.admission import never_fits
from service.domain.shrink import cannot_shrink
from service.errors import InvalidSpec
from service.ports import Cluster, Findings, Preflight
from train_loop.plan import ModelShape, Plan, data_starves, groups_across_hosts, lay_out, plan_sizes
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


@dataclass(frozen=True)
class Planner:
    """Checks specs, over the ports that it needs."""

    preflight: Preflight
    cluster: Cluster

    def check(self, spec: JobSpec, parent: Parent | None = None) -> Plans:
        """The plans, after a look at data and model. Raises InvalidSpec, PreflightFailed."""
        return self._plans(spec, self.preflight.check(spec, parent))

    def known(self, spec: JobSpec) -> Plans | None:
        """The plans, if data and model were found in order a moment ago. Raises InvalidSpec."""
        found = self.preflight.known(spec)
        return None if found is None else self._plans(spec, found)

    def _plans(self, spec: JobSpec, found: Findings) -> Plans:
        plans, broken = _planned(spec, found.shape)
        cluster = self.cluster.capacity()
        fewest = spec.scaling.at(min(plans, default=spec.scaling.bounds[0]))
        starves = data_starves(fewest, cluster.total if cluster else None)
        problems = [*([starves] if starves else []), *broken, *found.problems]
        if problems or not plans:
            raise InvalidSpec(problems)
        return plans

    def view(self, spec: JobSpec) -> PlanView:
        """The largest plan, laid out over the nodes that there are. Raises as `check`."""
        plans = self.check(spec)
        plan, cluster = plans[max(plans)], self.cluster.capacity()
        ranks = lay_out(spec.scaling.at(max(plans)), cluster.nodes) if cluster is not None else None
        nodes = tuple(ranks.values()) if ranks else None
        warnings = list(plan.warnings)
        if never := never_fits(spec.scaling.at(min(plans)), cluster):
            warnings.append(f"the job would stay QUEUED: {never}")
        if nodes and (
            apart := groups_across_hosts(plan.mesh, [node for node, ranks in enumerate(nodes) for _ in ranks])
        ):
            warnings.append(
                f"{len(apart)} of {plan.mesh.dp} Ulysses groups lie on several nodes, where their all-to-all is slow; "
                f"let the workers of a node be a multiple of ulysses_size={plan.mesh.sp}"
            )
        warnings += self.submit_warnings(spec, sizes_of(spec, plans))
        return PlanView(spec, plan, sizes_of(spec, plans), nodes, tuple(warnings))

    def submit_warnings(self, spec: JobSpec, sizes: tuple[int, ...]) -> tuple[str, ...]:
        """Return what the answer to a submit warns of: for now, an elastic job that cannot shrink."""
        if not sizes:
            return ()
        said = cannot_shrink(spec.scaling, sizes, self.cluster.capacity())
        return () if said is None else (said,)


def sizes_of(spec: JobSpec, plans: Plans) -> tuple[int, ...]:
    """The numbers of workers that an elastic job can run with."""
    return tuple(plans) if spec.scaling.elastic else ()


def _planned(spec: JobSpec, shape: ModelShape | None) -> tuple[Plans, list[Problem]]:
    """The plans for a model of known sizes, or the rules that the spec breaks."""
    try:
        return (plan_sizes(spec, shape) if shape else {}), []
    except SpecError as error:
        return {}, error.problems
