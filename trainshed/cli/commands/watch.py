"""`trainshed watch`, and the wait of `submit --wait` and `clone --wait`."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated

import typer

from service.api.schemas import JobOut
from service.domain.jobs.job import LIVE, JobState
from trainshed import Api
from trainshed.cli.connect import LONG_SECONDS, connect
from trainshed.cli.exit_codes import Exit, detach_on_interrupt
from trainshed.cli.ids import find_job
from trainshed.cli.options import AsJsonLines, JobRefs
from trainshed.cli.output.printing import console, next_command, notes, show_json, show_next
from trainshed.cli.output.progress import Display, display

_POLL_SECONDS = 1.0
_MOST_JOBS = 200


def watch(
    jobs: JobRefs = None,
    until: Annotated[
        JobState | None, typer.Option(help="stop when every job has reached this state", case_sensitive=False)
    ] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Watch jobs until they finish: the given jobs, or all active ones.

    Exits with 3 if a given job ends as FAILED or CANCELLED; with --until, if it never reached that state.
    """
    with connect(retry_seconds=LONG_SECONDS) as api:
        named = [find_job(api, job) for job in jobs or ()]
        watched = Watched(api, named)
        with detach_on_interrupt(*named), display(console, as_json=as_json) as show:
            last = follow(watched, until, show)
    if not as_json:
        show_next(next_command(last[0]) if last else "ps")
    raise typer.Exit(Exit.ENDED_BADLY if named and not all(succeeded(job, until) for job in last) else Exit.DONE)


def wait_for_end(job_id: str, *, as_json: bool) -> None:
    """Follow a job until it finishes, on stderr, or silently with `as_json`. Exits with 3 if it did not succeed."""
    view = nullcontext(_show_nothing) if as_json else display(notes, as_json=False)
    with connect(retry_seconds=LONG_SECONDS) as api, detach_on_interrupt(job_id), view as show:
        job = follow(Watched(api, [job_id]), None, show)[0]
    if as_json:
        show_json(job)
    else:
        show_next(next_command(job))
    raise typer.Exit(Exit.DONE if succeeded(job, None) else Exit.ENDED_BADLY)


def _show_nothing(jobs: Sequence[JobOut]) -> None:
    """Show nothing: the caller needs only the final state."""


@dataclass
class Watched:
    """The jobs with these ids. Without ids: all jobs that are active or were active at the last poll."""

    api: Api
    ids: list[str]
    _known: list[str] = field(default_factory=list)

    def poll(self) -> list[JobOut]:
        """Return the current state of the jobs."""
        if self.ids:
            return [self.api.job(job_id) for job_id in self.ids]
        live = self.api.jobs(states=LIVE, limit=_MOST_JOBS).data
        ids = {job.id for job in live}
        ended = [self.api.job(job_id) for job_id in self._known if job_id not in ids]
        self._known = [job.id for job in live]
        return [*live, *ended]


def follow(watched: Watched, until: JobState | None, show: Display) -> list[JobOut]:
    """Show jobs until each has finished or reached a state. Returns their last state."""
    first = dict[str, JobOut]()
    while True:
        jobs = watched.poll()
        show(jobs)
        first = {job.id: job for job in jobs} | first
        if all(job.state.terminal or reached(job, until, since=first[job.id]) for job in jobs):
            return jobs
        time.sleep(_POLL_SECONDS)


def reached(job: JobOut, state: JobState | None, *, since: JobOut) -> bool:
    """Return True if a job is in a state, or has entered it after the poll that returned `since`."""
    return state is not None and (job.state is state or job.times.get(state) != since.times.get(state))


def succeeded(job: JobOut, until: JobState | None) -> bool:
    """Return True if a job has reached the awaited state or, without one, has not failed or been cancelled."""
    return until in job.times if until else job.state not in (JobState.FAILED, JobState.CANCELLED)
