"""What those are told who watch the service: what is true of all of it, asked of the database, and of this process."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from service.domain.access import ANY, OPERATOR, Caller, Role
from service.domain.board import Board
from service.domain.job import Job, JobState
from service.errors import Forbidden
from service.ports import Counts, JobCounts, JobQuery, JobStore, RunDirs, RunTotals, Story, Totals, Watch

_KEPT_SECONDS = 5.0
"""Several may scrape; the database is asked for one of them."""
_MOST_PROJECTS = 100
_MOST_RUNS = 200
OTHERS = "(others)"
"""No project is called so: where there are more than a hundred, those with the fewest jobs."""


@dataclass
class Last:
    """What the database was last asked for, and when."""

    totals: Totals = field(default_factory=Totals)
    until: float = float("-inf")
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Watching:
    """The use case of those who watch, over the ports that it needs."""

    counts: JobCounts
    store: JobStore
    run_dirs: RunDirs
    watch: Watch
    clock: Callable[[], float]
    board: Board = field(default_factory=Board)
    last: Last = field(default_factory=Last)
    caller: Caller = OPERATOR

    def of(self, caller: Caller) -> "Watching":
        """The same for another caller."""
        return replace(self, caller=caller)

    def text(self, *, database_up: bool = True) -> bytes:
        """Every series, as Prometheus reads it; without a database, those of this process. Raises Forbidden."""
        if not self.caller.may(Role.VIEWER, ANY):
            raise Forbidden(
                f"key {self.caller.name!r} is no viewer of all projects, of which the metrics tell; ask the operator "
                "for one that is (trainshed keys create NAME --role '*=viewer')"
            )
        totals = self._totals() if database_up else Totals(database_up=False)
        return self.watch.text(replace(totals, cluster_up=not self.board.unreachable))

    def _totals(self) -> Totals:
        with self.last.lock:
            now = self.clock()
            if not now < self.last.until:
                self.last.totals, self.last.until = self._ask(now), now + _KEPT_SECONDS
            return self.last.totals

    def _ask(self, now: float) -> Totals:
        # Where more runs are at work than can be looked at in an instant, the newest of them.
        running = self.store.page(JobQuery(states=(JobState.RUNNING, JobState.RECOVERING), limit=_MOST_RUNS))
        runs = [(job, self.run_dirs.known_story(job.run_dir).story) for job in running]
        waits = bounded_oldest(self.counts.queued_since(), _MOST_PROJECTS)
        return Totals(
            bounded(self.counts.counts(), _MOST_PROJECTS),
            _goodput(runs, now),
            {project: max(now - since, 0.0) for project, since in waits.items()},
            self.counts.backlog(),
            tuple(_run_totals(job, story, now) for job, story in runs),
        )


def _goodput(runs: Sequence[tuple[Job, Story]], now: float) -> Mapping[str, float]:
    """By project."""
    new, wall = defaultdict[str, float](float), defaultdict[str, float](float)
    for job, story in runs:
        if job.started_at is not None:
            new[job.spec.project] += story.productive_seconds
            wall[job.spec.project] += now - job.started_at
    return {project: min(new[project] / seconds, 1.0) for project, seconds in wall.items() if seconds > 0}


def _run_totals(job: Job, story: Story, now: float) -> RunTotals:
    # Before its newest attempt it made no progress because nobody let it.
    began, done = job.attempt.started_at if job.attempt else now, story.progress
    waits_for = job.waits_for
    return RunTotals(
        project=job.spec.project,
        job=job.id,
        name=job.spec.name,
        restarts=story.restarts,
        progress_age=max(now - max((done.time if done else None) or began, began), 0.0),
        checkpoint_age=max(now - max(story.checkpoint_at or began, began), 0.0),
        step=done.step if done else 0,
        step_seconds=done.step_seconds if done else None,
        tokens_per_second=done.tokens_per_second if done else None,
        loss=done.loss if done else None,
        data_wait=done.data_wait if done else None,
        waits_for=waits_for.code.value if waits_for is not None else None,
    )


def bounded_oldest(since: Mapping[str, float], most: int) -> Mapping[str, float]:
    """The same with so many projects at most: of those whose jobs have waited least, the oldest is told as one."""
    oldest = sorted(since, key=since.__getitem__)
    own, others = oldest[:most], oldest[most:]
    return {project: since[project] for project in own} | ({OTHERS: since[others[0]]} if others else {})


def bounded(counts: Counts, most: int) -> Counts:
    """The same with so many projects at most: those with the fewest jobs are told as one."""
    sizes = Counter[str]()
    for (_, project), jobs in counts.items():
        sizes[project] += jobs
    own = {project for project, _ in sizes.most_common(most)}
    found = Counter[tuple[JobState, str]]()
    for (state, project), jobs in counts.items():
        found[state, project if project in own else OTHERS] += jobs
    return found
