"""Effects of a decision on the cluster and the run directory. Each may be repeated."""

from dataclasses import dataclass
from typing import assert_never

from service.domain.jobs.decision import Effect
from service.domain.jobs.job import Job
from service.domain.jobs.stopping import wanted_stop
from service.ports import Cluster, RunDirs, SubmitRequest


@dataclass(frozen=True)
class Effects:
    """Runner of effects."""

    cluster: Cluster
    run_dirs: RunDirs

    def run(self, effect: Effect, job: Job) -> None:
        """Run one effect of a job. Raises ClusterError, StorageAway and the errors of storage."""
        match effect:
            case Effect.RELEASE_PARENT:
                self.run_dirs.release_parent(job.run_dir)
            case Effect.SUBMIT:
                self._submit(job)
            case Effect.ASK_TO_STOP:
                if job.stop_request is not None:
                    self.run_dirs.request_stop(job.run_dir, wanted_stop(job.stop_request, job.attempts[-1]))
            case Effect.STOP_NOW:
                self.cluster.stop(job.attempts[-1].submission_id)
            case Effect.STOP_PREVIOUS:
                self.cluster.stop(job.attempts[-2].submission_id)
            case Effect.FENCE_OFF:
                self.run_dirs.fence_off(job.run_dir, attempt=job.attempts[-1].number + 1)
            case _:
                assert_never(effect)

    def _submit(self, job: Job) -> None:
        attempt = job.attempts[-1]
        self.run_dirs.prepare(job.run_dir, job.spec, job.size, attempt=attempt.number)
        self.cluster.submit(
            SubmitRequest(
                attempt.submission_id,
                job.id,
                job.spec.name,
                attempt=attempt.number,
                run_dir=job.run_dir,
                project=job.spec.project,
                labels=job.spec.labels,
            )
        )
