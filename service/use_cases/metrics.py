"""Service metrics: totals from the database and counters of this process."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from service.domain.access.roles import ANY, Principal, Role
from service.domain.jobs.job import Job, JobState
from service.domain.queue.snapshot import QueueSnapshot
from service.errors import Forbidden
from service.ports import Counts, JobCounts, JobQuery, JobStore, Metrics, RunDirs, RunSummary, RunTotals, Totals

_KEPT_SECONDS = 5.0
"""Cache time of the totals, so that several scrapers cause one database query."""
_MOST_PROJECTS = 100
_MOST_RUNS = 200
OTHERS = "(others)"
"""Label of the projects with the fewest jobs beyond the first hundred; not a valid project name."""


@dataclass
class Last:
    """The cached totals, and their expiry time."""

    totals: Totals = field(default_factory=Totals)
    until: float = float("-inf")
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class ServiceMetrics:
    """Use case of scraping metrics."""

    counts: JobCounts
    store: JobStore
    run_dirs: RunDirs
    metrics: Metrics
    clock: Callable[[], float]
    queue: QueueSnapshot = field(default_factory=QueueSnapshot)
    last: Last = field(default_factory=Last)

    def text(self, caller: Principal, *, database_up: bool = True) -> bytes:
        """Return all series in Prometheus format; without a database, only the series of this process.

        Raises Forbidden.
        """
        if not caller.has_role(Role.VIEWER, ANY):
            raise Forbidden(
                f"key {caller.name!r} is not a viewer of all projects, which metrics require; ask the operator "
                "for a key with this role (trainshed keys create NAME --role '*=viewer')"
            )
        totals = self._totals() if database_up else Totals(database_up=False)
        head, silent = self.queue.head, self.queue.silent_seconds(self.clock())
        now = replace(totals, cluster_up=not self.queue.unreachable, silent_seconds=silent)
        return self.metrics.text(replace(now, head_node="" if head is None else head.name))

    def _totals(self) -> Totals:
        with self.last.lock:
            now = self.clock()
            if not now < self.last.until:
                self.last.totals, self.last.until = self._read_totals(now), now + _KEPT_SECONDS
            return self.last.totals

    def _read_totals(self, now: float) -> Totals:
        # At most the newest 200 runs: reading more would take too long.
        running = self.store.page(JobQuery(states=(JobState.RUNNING, JobState.RECOVERING), limit=_MOST_RUNS))
        runs = [(job, self.run_dirs.latest_summary(job.run_dir).summary) for job in running]
        waits = bounded_oldest(self.counts.queued_since(), _MOST_PROJECTS)
        return Totals(
            bounded(self.counts.counts(), _MOST_PROJECTS),
            _goodput(runs, now),
            {project: max(now - since, 0.0) for project, since in waits.items()},
            self.counts.webhooks(),
            tuple(_run_totals(job, summary, now) for job, summary in runs),
        )


def _goodput(runs: Sequence[tuple[Job, RunSummary]], now: float) -> Mapping[str, float]:
    """Return the goodput of the running jobs by project: time of new steps / time since the start."""
    new, wall = defaultdict[str, float](float), defaultdict[str, float](float)
    for job, summary in runs:
        if job.started_at is not None:
            new[job.spec.project] += summary.productive_seconds
            wall[job.spec.project] += now - job.started_at
    return {project: min(new[project] / seconds, 1.0) for project, seconds in wall.items() if seconds > 0}


def _run_totals(job: Job, summary: RunSummary, now: float) -> RunTotals:
    # Time before the newest attempt does not count as missing progress.
    began, done = job.attempt.started_at if job.attempt else now, summary.progress
    waits_for = job.waits_for
    return RunTotals(
        project=job.spec.project,
        job=job.id,
        name=job.spec.name,
        restarts=summary.restarts,
        progress_age=max(now - max((done.time if done else None) or began, began), 0.0),
        checkpoint_age=max(now - max(summary.checkpoint_at or began, began), 0.0),
        attempt=len(job.attempts),
        step=done.step if done else 0,
        step_seconds=done.step_seconds if done else None,
        tokens_per_second=done.tokens_per_second if done else None,
        loss=done.loss if done else None,
        data_wait=done.data_wait if done else None,
        waits_for=waits_for.code.value if waits_for is not None else None,
    )


def bounded_oldest(since: Mapping[str, float], most: int) -> Mapping[str, float]:
    """Limit to `most` projects, longest wait first; the others are one entry with their oldest time."""
    oldest = sorted(since, key=since.__getitem__)
    own, others = oldest[:most], oldest[most:]
    return {project: since[project] for project in own} | ({OTHERS: since[others[0]]} if others else {})


def bounded(counts: Counts, most: int) -> Counts:
    """Limit to `most` projects, most jobs first; the others are added up as one entry."""
    sizes = Counter[str]()
    for (_, project), jobs in counts.items():
        sizes[project] += jobs
    own = {project for project, _ in sizes.most_common(most)}
    found = Counter[tuple[JobState, str]]()
    for (state, project), jobs in counts.items():
        found[state, project if project in own else OTHERS] += jobs
    return found
