"""Tools that read whole checkpoints in helper processes, outside the training and the service process."""

import subprocess
import sys
import threading
from collections.abc import Sequence

from pydantic import TypeAdapter

from service.errors import Busy, VerifyFailed
from service.ports import Digests
from train_loop.run_dir import ExportWish

_AT_ONCE = 2
"""Maximum number of concurrent exports of one service."""
_FAULTS: TypeAdapter[list[str] | None] = TypeAdapter(list[str] | None)
_DIGESTS: TypeAdapter[Digests | None] = TypeAdapter(Digests | None)


class HelperTools:
    """CheckpointTools that run `python -m train_loop.checkpoint.manifest`, `.digest` and `.export`.

    `timeout` is the limit of a verification and of digests, in seconds.
    """

    def __init__(self, *, timeout: float, python: Sequence[str] = (sys.executable,)) -> None:
        self._timeout = timeout
        self._python = tuple(python)
        self._free = threading.Semaphore(_AT_ONCE)

    def verify(self, run_dir: str, step: int) -> list[str] | None:
        """Return the faults of a checkpoint; None if it does not exist. Raises VerifyFailed if it could not be read."""
        return _FAULTS.validate_json(self._read("manifest", run_dir, step))

    def digests(self, run_dir: str, step: int) -> Digests | None:
        """Return the digests or faults of a checkpoint; None if it does not exist.

        Raises VerifyFailed if it could not be read.
        """
        return _DIGESTS.validate_json(self._read("digest", run_dir, step))

    def _read(self, tool: str, run_dir: str, step: int) -> str:
        """Return the output of a tool that reads a whole checkpoint. Raises VerifyFailed."""
        command = [*self._python, "-m", f"train_loop.checkpoint.{tool}", run_dir, "--step", str(step)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self._timeout)
        except subprocess.TimeoutExpired as error:
            raise VerifyFailed(
                f"reading the checkpoint took over {self._timeout:g} s; check that the storage answers, or raise "
                "TRAINSHED_VERIFY_SECONDS"
            ) from error
        if done.returncode:
            raise VerifyFailed(f"the checkpoint could not be read: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return done.stdout

    def export(self, run_dir: str, step: int, wish: ExportWish) -> None:
        """Start an export, which outlives this process. Raises Busy if too many exports run."""
        command = [*self._python, "-m", "train_loop.checkpoint.export", run_dir, "--step", str(step)]
        command += ["--dtype", wish.dtype, "--weights", wish.weights]
        if not self._free.acquire(blocking=False):
            raise Busy(f"{_AT_ONCE} exports are running, the maximum; retry when one has finished")
        threading.Thread(target=self._run, args=(command,), name="export", daemon=True).start()

    def _run(self, command: Sequence[str]) -> None:
        nothing = subprocess.DEVNULL
        try:
            # The export's status file reports failures.
            subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
        finally:
            self._free.release()
