"""Idle time of each attempt, and detection of unusually long pauses."""

from collections.abc import Callable
from dataclasses import dataclass, field

from service.domain.jobs.condition import clock_time
from service.domain.jobs.job import Job
from service.domain.jobs.reason import Code, Reason
from service.ports import AttemptObservation

_MOST_IDLE_SECONDS = 60.0
"""Maximum idle seconds that one reconcile pass adds."""
_STALL_SECONDS = 10.0
_UNUSUAL = 3.0
"""Ratio to the longest earlier pause from which a pause is unusual."""
_ENOUGH = 3
"""Number of pauses that an attempt must have had before a pause can be unusual."""


@dataclass(frozen=True)
class _Idle:
    """State of an attempt: its number and the size of its output, its idle time, and its earlier pauses."""

    size: tuple[int, int]
    seen: float
    since: float
    seconds: float = 0.0
    longest: float = 0.0
    pauses: int = 0


@dataclass
class IdleTimers:
    """Idle times, measured with the reconciler's clock because the clocks of hosts may differ."""

    clock: Callable[[], float]
    _known: dict[str, _Idle] = field(default_factory=dict)

    def seconds(self, job: Job, observed: AttemptObservation) -> float:
        """Return the idle time of an attempt in seconds; 0 before its workers are ready."""
        now, size = self.clock(), (len(job.attempts), observed.size)
        before = self._known.get(job.id, _Idle(size, now, now))
        if not (observed.ready or observed.gone) or before.size[0] != size[0]:
            found = _Idle(size, now, now)
        elif before.size != size:
            longest = max(before.longest, before.seconds)
            found = _Idle(size, now, now, longest=longest, pauses=before.pauses + 1)
        else:
            # Bounded, because a suspended machine or a changed clock does not mean a hang.
            seconds = before.seconds + min(max(now - before.seen, 0.0), _MOST_IDLE_SECONDS)
            found = _Idle(size, now, before.since, seconds, before.longest, before.pauses)
        self._known[job.id] = found
        return found.seconds

    def stalled(self, job: Job) -> Reason | None:
        """Return the reason if an attempt has been idle for unusually long; None otherwise."""
        idle = self._known.get(job.id)
        if idle is None or idle.pauses < _ENOUGH or idle.seconds < max(_STALL_SECONDS, _UNUSUAL * idle.longest):
            return None
        usual = max(idle.longest, 1.0)
        message = f"no step has ended since {clock_time(idle.since)}; until then the longest took {usual:.0f} s"
        remedy = (
            "trainshed nodes lists hosts that are gone; trainshed doctor tries to write to the storage; "
            "trainshed logs JOB --rank N shows where a rank is"
        )
        return Reason(Code.STALLED, message, remedy)

    def forget(self, job_id: str) -> None:
        """Drop the state of a finished job."""
        self._known.pop(job_id, None)
