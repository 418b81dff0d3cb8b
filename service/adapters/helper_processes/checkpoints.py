"""Tools that read whole checkpoints in helper processes, outside the training and the service process."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from pydantic import TypeAdapter

from service.adapters.ray.environment import environment_of_helpers
from service.domain.jobs.job import Job
from service.errors import Busy, VerifyFailed
from service.ports import Cancellation, Digests
from train_loop.run_dir import READ_POLICY_VARIABLE, ExportWish, ReadPolicy

_AT_ONCE, _PER_PROJECT = 4, 2
"""Maximum numbers of concurrent exports: of one service, and of one project. The last is left to a project without."""
_FAULTS: TypeAdapter[list[str] | None] = TypeAdapter(list[str] | None)
_DIGESTS: TypeAdapter[Digests | None] = TypeAdapter(Digests | None)


class _Failed(Exception):
    """A tool that failed, with its last line."""


class HelperTools:
    """CheckpointTools that run `python -m train_loop.checkpoint.manifest`, `.digest` and `.export`.

    `timeout` is the limit of a verification and of digests, in seconds. `read_policy` returns the policy of a project's
    inputs, of which exports copy files; without it they may copy any file.
    """

    def __init__(
        self,
        *,
        timeout: float,
        python: Sequence[str] = (sys.executable,),
        read_policy: Callable[[str], ReadPolicy] | None = None,
    ) -> None:
        self._read_policy = read_policy
        self._timeout = timeout
        self._python = tuple(python)
        self._lock = threading.Lock()
        self._exports = Counter[str]()

    def verify(self, run_dir: str, step: int, cancellation: Cancellation) -> list[str] | None:
        """Return the faults of a checkpoint; None if it does not exist.

        Raises VerifyFailed if it could not be read, CallCancelled.
        """
        return _FAULTS.validate_json(self._read_checkpoint("manifest", run_dir, step, cancellation))

    def digests(self, run_dir: str, step: int, cancellation: Cancellation) -> Digests | None:
        """Return the digests or faults of a checkpoint; None if it does not exist.

        Raises VerifyFailed if it could not be read, CallCancelled.
        """
        return _DIGESTS.validate_json(self._read_checkpoint("digest", run_dir, step, cancellation))

    def _read_checkpoint(self, tool: str, run_dir: str, step: int, cancellation: Cancellation) -> str:
        """Return the output of a tool that reads a whole checkpoint. Raises VerifyFailed, CallCancelled."""
        try:
            return self._read([f"train_loop.checkpoint.{tool}", run_dir, "--step", str(step)], cancellation)
        except _Failed as error:
            raise VerifyFailed(f"the checkpoint could not be read: {error}") from error

    def _read(self, arguments: Sequence[str], cancellation: Cancellation) -> str:
        """Return the output of a tool. Raises _Failed, CallCancelled."""
        command = [*self._python, "-m", *arguments]
        pipe = subprocess.PIPE
        with (
            subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, env=environment_of_helpers(os.environ)
            ) as process,
            cancellation.ending(process.kill),
        ):
            out, err = self._wait(process)
        if process.returncode:
            raise _Failed((err.strip().splitlines() or ["?"])[-1])
        return out

    def _wait(self, process: "subprocess.Popen[str]") -> tuple[str, str]:
        try:
            return process.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise _Failed(
                f"it took over {self._timeout:g} s; check that the storage answers, or raise TRAINSHED_VERIFY_SECONDS"
            ) from error

    def export(self, job: Job, step: int, wish: ExportWish) -> None:
        """Start an export, which outlives this process.

        Raises Busy if too many exports run, of all projects or of this one.
        """
        command = [*self._python, "-m", "train_loop.checkpoint.export", job.run_dir, "--step", str(step)]
        command += ["--dtype", wish.dtype, "--weights", wish.weights, *(["--form", wish.form] if wish.form else [])]
        command += ["--with", wish.include] if wish.include else []
        project = job.spec.project
        with self._lock:
            self._require_share(project)
            self._exports[project] += 1
        threading.Thread(target=self._run, args=(command, project), name="export", daemon=True).start()

    def _require_share(self, project: str) -> None:
        own, others = self._exports[project], self._exports.total() - self._exports[project]
        if own >= _PER_PROJECT:
            raise Busy(f"{own} exports of project {project} are running, the maximum; retry when one has finished")
        if own + others >= _AT_ONCE - bool(own):
            raise Busy(f"{own + others} exports are running, the maximum; retry when one has finished")

    def _run(self, command: Sequence[str], project: str) -> None:
        nothing, environment = subprocess.DEVNULL, environment_of_helpers(os.environ)
        if self._read_policy is not None:
            # A link in a tokenizer's folder may have changed since submission.
            environment[READ_POLICY_VARIABLE] = self._read_policy(project).without_users().model_dump_json()
        try:
            # The export's status file reports failures.
            subprocess.run(
                command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, env=environment
            )
        finally:
            with self._lock:
                self._exports[project] -= 1
