"""admit(entries, cluster, rules) -> Admission: which jobs start, which are preempted, and why the rest wait. Pure.

Jobs start in order of priority, then age, with all workers at once. Resources that a due job lacks are reserved for it.
A later job may start before it (backfill) only if that cannot delay the due job, however long any job runs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from service.domain.jobs.job import JobState
from service.domain.jobs.reason import Code, Reason
from service.domain.queue.backfill import may_pass
from service.domain.queue.entry import QueueEntry, named_together, queue_order
from service.domain.queue.placement import Placement
from service.domain.queue.policy import ProjectUsage, QueuePolicy, Quota
from service.domain.queue.preemption import choose_victims
from service.domain.queue.resources import NOISE, Resources, add_up, shortage, subtract
from service.domain.queue.snapshot import Admission
from train_loop.plan import Capacity, data_starves, no_place, too_big
from train_loop.spec import MEMORY, ScalingSpec


def never_fits(scaling: ScalingSpec, cluster: Capacity | None, *, group: int = 1) -> str | None:
    """Return why the cluster, at its present size, can never hold the job; None if it can or if that is unknown."""
    if cluster is None:
        return None
    starves = data_starves(scaling, cluster.total)
    missing = too_big(scaling, cluster.total) or (starves.message if starves else None)
    return missing or no_place(scaling, cluster.nodes, group=group)


def admit(
    entries: Iterable[QueueEntry],
    cluster: Capacity | None,
    rules: QueuePolicy,
    *,
    now: float = 0.0,
    unreachable: Reason | None = None,
) -> Admission:
    """Decide about all entries at once. `cluster` is its capacity, None if it does not answer.

    `unreachable` is the reason of waiting jobs if the cluster has not answered for some time.
    """
    if cluster is not None and MEMORY not in cluster.total:
        entries = [entry.without_memory() for entry in entries]
    ordered = sorted(entries, key=queue_order)
    waiting = [entry for entry in ordered if entry.waits]
    if cluster is None:
        unknown = Reason(Code.CLUSTER_UNREACHABLE, "the cluster is not reachable yet; the job starts once it answers")
        return Admission(waits={entry.id: unreachable or unknown for entry in waiting})
    admission = _AdmissionPass(cluster, rules, [entry for entry in ordered if entry.holds])
    for entry in waiting:
        admission.decide(entry)
    resizes = dict(admission.shrink()) or dict(admission.grow(now))
    return Admission(tuple(admission.starts), admission.workers, admission.preempts, resizes, admission.waits)


class _AdmissionPass:
    """The resources in use, updated while the queue is processed from its front."""

    def __init__(self, cluster: Capacity, rules: QueuePolicy, holders: Sequence[QueueEntry]) -> None:
        self.starts: list[str] = []
        self.workers: dict[str, int] = {}
        self.preempts: dict[str, str] = {}
        self.waits: dict[str, Reason] = {}
        self._cluster, self._total = cluster, cluster.total
        self._rules = rules
        self._holders: list[QueueEntry] = []
        self._held: Resources = {}
        self._used: dict[str, ProjectUsage] = {}
        self._blocked: list[QueueEntry] = []
        self._refused: list[tuple[Resources, QueueEntry]] = []
        self._over_quota: set[str] = set()
        self._place = 0
        self._placement: Placement | None = None
        for entry in holders:
            self._hold(entry)

    def decide(self, entry: QueueEntry) -> None:
        """Start a job, or record why it waits. An elastic job starts with as many workers as fit."""
        if entry.sizes:
            most = self._most_workers(entry)
            larger = (entry.at(workers) for workers in reversed(entry.sizes[1:]) if workers <= most)
            entry = next(filter(self._may_start, larger), entry.at(entry.sizes[0]))
        reason = self._why_wait(entry)
        if reason is not None:
            self.waits[entry.id] = reason
            return
        self.starts.append(entry.id)
        self._hold(entry)
        if entry.sizes:
            self.workers[entry.id] = entry.scaling.world

    def shrink(self) -> Iterator[tuple[str, int]]:
        """Yield each elastic job whose workers no longer fit, and the number of workers that would fit."""
        for entry in self._holders:
            if entry.state not in (JobState.STARTING, JobState.RECOVERING) or entry.id in self.starts:
                continue
            others = subtract(self._held, [entry.needs])
            if self._has_room(entry, others):
                continue
            for workers in reversed(entry.sizes):
                smaller = entry.at(workers)
                if workers < entry.scaling.world and self._has_room(smaller, others):
                    self._held = add_up([others, smaller.needs])
                    yield entry.id, workers
                    break

    def grow(self, now: float) -> Iterator[tuple[str, int]]:
        """Yield each elastic job that can grow, with its new size; nothing while another job waits for capacity."""
        if self._blocked or self.preempts:
            return
        for entry in self._holders:
            if entry.state is not JobState.RUNNING or now - entry.since < self._rules.resize_seconds:
                continue
            others = subtract(self._held, [entry.needs])
            for workers in reversed(entry.sizes):
                larger = entry.at(workers)
                if workers <= entry.scaling.world:
                    break
                more = self._used[entry.project].with_workers(larger, instead_of=entry)
                if self._over(entry, more) is None and self._has_room(larger, others) and self._has_places(larger):
                    self._held, self._used[entry.project] = add_up([others, larger.needs]), more
                    if self._placement is not None:
                        self._placement.reserve(larger)
                    yield entry.id, workers
                    break

    def _may_start(self, entry: QueueEntry) -> bool:
        """Return whether the job could start now. Unlike `_why_wait`, this records no reason."""
        more = self._used.get(entry.project, ProjectUsage()).plus(entry)
        return (
            entry.project not in self._over_quota
            and self._over(entry, more) is None
            and self._has_room(entry, self._held)
            and self._has_places(entry)
            and self._first_delayed(entry) is None
        )

    def _most_workers(self, entry: QueueEntry) -> float:
        """Return an upper limit for the number of workers that fit. This is cheaper than a check of every size."""
        # Memory of a worker depends on the number of workers.
        named = entry.scaling.resources_per_worker.items()
        each = ((name, amount) for name, amount in named if amount and name != MEMORY)
        free = ((self._total.get(name, 0.0) - self._held.get(name, 0.0) + NOISE, amount) for name, amount in each)
        return min((left / amount for left, amount in free), default=math.inf)

    def _has_room(self, entry: QueueEntry, held: Resources) -> bool:
        """Return whether the cluster has the needed resources in addition to `held`, and a node for each worker."""
        return (
            shortage(entry.needs, self._total, held) is None
            and never_fits(entry.scaling, self._cluster, group=entry.group) is None
        )

    def _has_places(self, entry: QueueEntry) -> bool:
        """Return whether the nodes have free places for the workers, as far as other placements are known."""
        if self._placement is None:
            # Built on demand: only elastic jobs need it, and placing a thousand jobs takes time.
            self._placement = Placement(self._cluster, self._holders)
        return self._placement.fits(entry)

    def _hold(self, entry: QueueEntry) -> None:
        self._holders.append(entry)
        self._held = add_up([self._held, entry.needs])
        self._used[entry.project] = self._used.get(entry.project, ProjectUsage()).plus(entry)
        if self._placement is not None:
            self._placement.reserve(entry)

    def _why_wait(self, entry: QueueEntry) -> Reason | None:
        # Only a job that can never start does not block the jobs after it.
        if never := never_fits(entry.scaling, self._cluster, group=entry.group):
            what, _, remedy = never.partition("; ")
            return Reason(Code.UNSCHEDULABLE, what, remedy)
        if never := self._over(entry, ProjectUsage().plus(entry)):
            remedy = "raise the quota, or cancel the job and submit one with fewer or smaller workers"
            return Reason(Code.UNSCHEDULABLE, never, remedy)
        self._place += 1
        if entry.project in self._over_quota:
            before = f"number {self._place} in the queue; another job of project {entry.project} is before it"
            return Reason(Code.QUOTA, before, "it starts when another job of the project ends")
        if over := self._over(entry, self._used.get(entry.project, ProjectUsage()).plus(entry)):
            self._over_quota.add(entry.project)
            return Reason(Code.QUOTA, over, "it starts when another job of the project ends")
        if missing := shortage(entry.needs, self._total, self._held):
            return self._block(entry, missing)
        first = self._first_delayed(entry)
        if first is None:
            return None
        self._blocked.append(entry)
        before = first.named_to(entry.project)
        return Reason(Code.QUEUE, f"number {self._place} in the queue; {before} is before it and waits for capacity")

    def _block(self, entry: QueueEntry, missing: str) -> Reason:
        if self._rules.preemption and not self._blocked:
            victims = choose_victims(entry, self._holders, held=self._held, total=self._total)
            self.preempts = {victim.id: entry.id for victim in victims}
            if victims:
                missing += f"; preempting {named_together(victims, entry.project)} of lower priority"
        self._blocked.append(entry)
        place = "next in the queue" if self._place == 1 else f"number {self._place} in the queue"
        return Reason(Code.CAPACITY, f"{place}; waits for {missing}")

    def _over(self, entry: QueueEntry, after: ProjectUsage) -> str | None:
        """Return which quota of the project the usage `after` exceeds; None if it exceeds none."""
        quotas = self._rules.quotas
        quota = quotas.get(entry.project, quotas.get("*", Quota()))
        for name, most, then in (
            ("jobs", quota.jobs, after.jobs),
            ("workers", quota.workers, after.workers),
            ("GPUs", quota.gpus, after.gpus),
        ):
            if most is not None and then > most + NOISE:
                return f"the quota of project {entry.project} is {most:g} {name}; with this job it would use {then:g}"
        return None

    def _first_delayed(self, entry: QueueEntry) -> QueueEntry | None:
        """Return the first blocked job that this job could delay; None if there is none."""
        if not self._rules.backfill:
            return self._blocked[0] if self._blocked else None
        # A job at least as large as a refused one delays the same blocked job.
        for smaller, before in self._refused:
            if all(entry.needs.get(name, 0.0) >= amount for name, amount in smaller.items()):
                return before
        for place, blocked in enumerate(self._blocked):
            others = [*self._holders, *self._blocked[:place]]
            if not may_pass(entry, blocked, others, total=self._total):
                self._refused.append((entry.needs, blocked))
                return blocked
        return None
