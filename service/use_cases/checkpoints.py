"""Use cases of a job's checkpoints: list, verify, digest, pin, export."""

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import JsonValue

from service.domain.access.roles import Principal, Role
from service.domain.jobs.job import Job
from service.errors import CheckpointDamaged, CheckpointNotFound, ExportNotFound, InvalidRequest
from service.ports import Cancellation, Checkpoint, CheckpointTools, Digests, KeyStore, RunDirs
from service.use_cases.jobs.audit_entries import action_entry
from service.use_cases.jobs.jobs import Jobs
from train_loop.run_dir import ExportStatus, ExportWish
from train_loop.spec import Problem


@dataclass(frozen=True)
class CheckpointActions:
    """Use cases of checkpoints. Each raises JobNotFound and CheckpointNotFound."""

    jobs: Jobs
    run_dirs: RunDirs
    tools: CheckpointTools
    audit: KeyStore
    clock: Callable[[], float]

    def checkpoints(self, caller: Principal, job_id: str) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first."""
        return self.run_dirs.checkpoints(self.jobs.find(caller, job_id).run_dir)

    def verify(self, caller: Principal, job_id: str, step: int, cancellation: Cancellation) -> list[str]:
        """Read a whole checkpoint, and return its faults. Raises VerifyFailed, CallCancelled."""
        faults = self.tools.verify(self.jobs.find(caller, job_id, Role.EDITOR).run_dir, step, cancellation)
        if faults is None:
            raise CheckpointNotFound(job_id, step)
        return faults

    def digests(self, caller: Principal, job_id: str, step: int, cancellation: Cancellation) -> Digests:
        """Read a whole checkpoint, and return the digests of its tensors.

        Raises CheckpointDamaged, VerifyFailed, CallCancelled.
        """
        # Missing steps need no process.
        self._find(caller, job_id, step)
        found = self.tools.digests(self.jobs.find(caller, job_id).run_dir, step, cancellation)
        if found is None:
            raise CheckpointNotFound(job_id, step)
        if found.faults:
            raise CheckpointDamaged(job_id, step, found.faults)
        return found

    def pin(self, caller: Principal, job_id: str, step: int) -> Checkpoint:
        """Exempt a checkpoint from retention."""
        job = self._to_pin(caller, job_id, step, pinned=True)
        if not self.run_dirs.pin(job.run_dir, step):
            raise CheckpointNotFound(job_id, step)
        return self._find(caller, job_id, step)

    def unpin(self, caller: Principal, job_id: str, step: int) -> Checkpoint:
        """Make a checkpoint subject to retention again."""
        job = self._to_pin(caller, job_id, step, pinned=False)
        self.run_dirs.unpin(job.run_dir, step)
        return self._find(caller, job_id, step)

    def _to_pin(self, caller: Principal, job_id: str, step: int, *, pinned: bool) -> Job:
        job = self.jobs.find(caller, job_id, Role.EDITOR)
        if self._find(caller, job_id, step).pinned != pinned:
            # Recorded first: after a crash, the audit log may contain an undone change, but never lacks a done one.
            before, after = ({"step": step, "pinned": is_so} for is_so in (not pinned, pinned))
            action = "pin" if pinned else "unpin"
            self.audit.record(action_entry(caller, action, job, before=before, after=after, now=self.clock()))
        return job

    def export(self, caller: Principal, job_id: str, step: int, wish: ExportWish) -> ExportStatus:
        """Start the export of a checkpoint as a Hugging Face folder, once; return its status.

        Raises InvalidRequest, Busy.
        """
        job = self.jobs.find(caller, job_id, Role.EDITOR)
        status = self.run_dirs.exported(job.run_dir, step, wish, now=self.clock())
        if status is not None and status.state != "failed":
            return status
        self._find(caller, job_id, step)
        if wish.weights == "ema" and job.spec.run.training.ema_decay is None:
            raise InvalidRequest(
                [
                    Problem(
                        "/weights",
                        "the job has no EMA weights (training.ema_decay is not set); export its weights",
                    )
                ]
            )
        if fault := wish.fault(job.spec.run.model):
            raise InvalidRequest([Problem("/form", fault)])
        if fault := wish.fault_of_states(job.spec.run):
            raise InvalidRequest([Problem("/include", fault)])
        # Started before it is recorded, because the start may be refused.
        self.tools.export(job, step, wish)
        after: dict[str, JsonValue] = {"step": step, "dtype": wish.dtype, "weights": wish.weights}
        after |= {"form": wish.form} if wish.form else {}
        after |= {"include": wish.include} if wish.include else {}
        self.audit.record(action_entry(caller, "export", job, before={}, after=after, now=self.clock()))
        begun = ExportStatus(step=step, wish=wish, state="running", time=self.clock())
        if status is not None:
            # The export may be complete but for its event, which has these.
            begun = begun.model_copy(update={"difference": status.difference, "completed": status.completed})
        if self.run_dirs.exported(job.run_dir, step, wish, now=self.clock()) == status:
            # The export has not written its status yet.
            self.run_dirs.write_export(job.run_dir, begun)
        return begun

    def exported(self, caller: Principal, job_id: str, step: int, wish: ExportWish) -> ExportStatus:
        """Return the status of an export. Raises ExportNotFound."""
        status = self.run_dirs.exported(self.jobs.find(caller, job_id).run_dir, step, wish, now=self.clock())
        if status is None:
            raise ExportNotFound(step)
        return status

    def _find(self, caller: Principal, job_id: str, step: int) -> Checkpoint:
        found = next((c for c in self.checkpoints(caller, job_id) if c.manifest.step == step), None)
        if found is None:
            raise CheckpointNotFound(job_id, step)
        return found
