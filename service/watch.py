"""What those are told who watch the service: what is true of all of it, asked of the database, and of this process."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from service.domain.access import ANY, OPERATOR, Caller, Role
from service.domain.job import JobState
from service.errors import Forbidden
from service.ports import Counts, JobCounts, JobQuery, JobStore, RunDirs, Totals, Watch

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
    last: Last = field(default_factory=Last)
    caller: Caller = OPERATOR

    def of(self, caller: Caller) -> "Watching":
        """The same for another caller."""
        return replace(self, caller=caller)

    def text(self) -> bytes:
        """Every series, as Prometheus reads it. Raises Forbidden."""
        if not self.caller.may(Role.VIEWER, ANY):
            raise Forbidden(
                f"key {self.caller.name!r} is no viewer of all projects, of which the metrics tell; ask the operator "
                "for one that is (trainshed keys create NAME --role '*=viewer')"
            )
        return self.watch.text(self._totals())

    def _totals(self) -> Totals:
        with self.last.lock:
            now = self.clock()
            if not now < self.last.until:
                self.last.totals = Totals(bounded(self.counts.counts(), _MOST_PROJECTS), self._goodput(now))
                self.last.until = now + _KEPT_SECONDS
            return self.last.totals

    def _goodput(self, now: float) -> Mapping[str, float]:
        """By project; where more runs are at work than can be looked at in an instant, of the newest of them."""
        new, wall = defaultdict[str, float](float), defaultdict[str, float](float)
        for job in self.store.page(JobQuery(states=(JobState.RUNNING, JobState.RECOVERING), limit=_MOST_RUNS)):
            if job.started_at is not None:
                new[job.spec.project] += self.run_dirs.known_story(job.run_dir).story.productive_seconds
                wall[job.spec.project] += now - job.started_at
        return {project: min(new[project] / seconds, 1.0) for project, seconds in wall.items() if seconds > 0}


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
