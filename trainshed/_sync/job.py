# Generated from trainshed/_async/job.py by `make client`; do not edit.

"""The synchronous handle of a job."""

from collections.abc import Callable, Iterator
from time import sleep
from typing import Literal, Self, TypeVar

from service.api.schemas import CheckpointOut, DigestsOut, ExportIn, ExportOut, Level, Line, Page, RunAuditOut
from service.domain.jobs.job import JobState
from trainshed._sync.api import Api
from trainshed.job_base import POLL_SECONDS, Deadline, JobHandle, States, is_exported, newest_step, reached, states_of

T = TypeVar("T")


class Job(JobHandle[Api]):
    """A job. Its properties hold the service's last answer; `refresh` requests a new one."""

    def refresh(self) -> Self:
        """Request the current state of the job."""
        self.info = self._api.job(self.id)
        return self

    def wait(self, until: States = JobState.SUCCEEDED, *, timeout: float | None = None) -> Self:
        """Wait until the job is in a state, or in one of several.

        Raises JobFailed, JobCancelled or JobEnded if it finishes in another state, and TimeoutError after `timeout`
        seconds.
        """
        wanted = states_of(until)
        deadline = Deadline(f"{self.id} to be {' or '.join(wanted)}", timeout)
        while not reached((self.refresh()).info, wanted):
            deadline.check()
            sleep(POLL_SECONDS)
        return self

    def pause(self, *, grace_seconds: float | None = None) -> Self:
        """Request a pause: commit a checkpoint and leave the cluster. Use `wait(JobState.PAUSED)` to wait for it."""
        self.info = self._api.pause(self.id, grace_seconds=grace_seconds)
        return self

    def resume(self, *, workers: int | None = None) -> Self:
        """Resume the job, by default with the same number of workers."""
        scaling = self.info.scaling.at(workers) if workers else None
        self.info = self._api.resume(self.id, scaling=scaling)
        return self

    def cancel(self, *, grace_seconds: float | None = None, checkpoint: bool = True) -> Self:
        """Request the cancellation. Use `wait(JobState.CANCELLED)` to wait for it."""
        self.info = self._api.cancel(self.id, grace_seconds=grace_seconds, checkpoint=checkpoint)
        return self

    def delete(self) -> None:
        """Delete a finished job. Its run directory is kept."""
        self._api.delete(self.id)

    def clone(self, *, from_checkpoint: int | None = None, **overrides: object) -> "Job":
        """Submit a job that starts from the newest or another checkpoint of this one, with changes to its spec."""
        return Job(self._api, self._api.clone(self.id, from_checkpoint=from_checkpoint, overrides=overrides))

    def checkpoints(self) -> list[CheckpointOut]:
        """Return the committed checkpoints, oldest first."""
        return (self._api.checkpoints(self.id)).data

    def digests(self, step: int | None = None) -> DigestsOut:
        """Return the digests of a checkpoint's tensors, by default of the newest, to compare it with another job's.

        They do not depend on the number of workers. Raises LookupError if the job has no checkpoint.
        """
        step = newest_step(self.id, self.checkpoints()) if step is None else step
        return self._api.digests(self.id, step)

    def audit(self) -> RunAuditOut:
        """Check the samples that its steps trained, over all attempts. `audit().clean` is False if any is wrong."""
        return self._api.audit_job(self.id)

    def export(
        self,
        step: int | None = None,
        *,
        dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        weights: Literal["model", "ema"] = "model",
        form: Literal["adapter", "merged", "dequantized"] | None = None,
        include: Literal["optimizer"] | None = None,
        timeout: float | None = None,
    ) -> ExportOut:
        """Export a checkpoint, by default the newest, as a Hugging Face folder, and wait until it is at `path`.

        A job with `model.lora` has a `form`: a folder for peft by default, or the merged model, which is
        `dequantized` with `model.quantize_base`. With `include="optimizer"`, another job may continue from the folder,
        as its `model.path` and `training.optimizer_state`.

        Raises ExportFailed, LookupError if the job has no checkpoint, and TimeoutError after `timeout` seconds.
        """
        step = newest_step(self.id, self.checkpoints()) if step is None else step
        wish = ExportIn(dtype=dtype, weights=weights, form=form, include=include)
        status = self._api.export(self.id, step, wish)
        if not is_exported(status):
            deadline = Deadline(f"the export of step {step}", timeout)
            while not is_exported(status := self._api.exported(self.id, step, wish)):
                deadline.check()
                sleep(POLL_SECONDS)
        return status

    def logs(
        self,
        *,
        follow: bool = False,
        attempt: int | None = None,
        rank: int | None = None,
        contains: str | None = None,
        level: Level | None = None,
        raw: bool = False,
    ) -> Iterator[str]:
        """Yield a log, by default the driver's in the newest attempt. With `follow`, until the job finishes.

        With `raw`, the driver's log has its tracebacks.
        """
        if follow:
            return self._api.follow_logs(self.id, attempt=attempt, rank=rank, contains=contains, level=level, raw=raw)
        return pages(
            lambda after: self._api.logs(
                self.id, attempt=attempt, rank=rank, contains=contains, level=level, raw=raw, after=after, limit=1000
            )
        )

    def events(self, *, follow: bool = False, contains: str | None = None) -> Iterator[Line]:
        """Yield the events of all attempts. With `follow`, until the job finishes."""
        if follow:
            return self._api.follow_events(self.id, contains=contains)
        return pages(lambda after: self._api.events(self.id, contains=contains, after=after, limit=1000))

    def metrics(self, *, follow: bool = False) -> Iterator[Line]:
        """Yield one line per logged step, over all attempts. With `follow`, until the job finishes."""
        if follow:
            return self._api.follow_metrics(self.id)
        return pages(lambda after: self._api.metrics(self.id, after=after, limit=1000))

    def results(self) -> Iterator[Line]:
        """Yield the committed rows of an inference job."""
        return pages(lambda after: self._api.results(self.id, after=after, limit=1000))


def pages(fetch: Callable[[str | None], Page[T]]) -> Iterator[T]:
    """Yield the items of all pages. Each page is requested when it is needed."""
    more, after = True, None
    while more:
        page = fetch(after)
        yield from page.data
        more, after = page.has_more, page.next
