"""Weights & Biases sink: a run in the account of WANDB_API_KEY, or in a folder, as WANDB_MODE sets."""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from train_loop.run_dir import Outcome, is_remote, make_folder
from train_loop.sinks.describe import Description
from train_loop.sinks.sink import Point, cannot_import

_SETTINGS: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "reinit": "create_new",
    "disable_git": True,
    "save_code": False,
    # These would describe the driver's machine, which does not train.
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandB:
    """A run with the job's id, resumed by every attempt.

    wandb's own process buffers points in a file and sends them later; it offers no call to send them at once.
    """

    # It sends every 15 s, and ends together with a driver that is killed.
    settle_seconds = 30.0

    def __init__(self, described: Description, folder: Path) -> None:
        # No error reports about users.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            # The only import of an optional dependency, which takes seconds.
            import wandb  # noqa: PLC0415
        except ImportError as error:
            raise cannot_import("wandb", error) from error
        self._wandb = wandb
        try:
            self._run = self._begin(described, folder)
        except Exception:
            # Otherwise wandb's process would treat the run that failed to start as in use, permanently.
            wandb.teardown()
            raise

    def write(self, points: Sequence[Point]) -> None:
        """Send points to wandb's process."""
        for point in points:
            self._run.log({"step": point.step, "_timestamp": point.time, **point.scalars})

    def close(self, outcome: Outcome | None) -> None:
        """Send all remaining points, and mark the run as finished or failed."""
        try:
            self._run.finish(exit_code=1 if outcome is not None and outcome.result == "failed" else 0)
        finally:
            self._wandb.teardown()

    def _begin(self, described: Description, folder: Path) -> Any:
        # Points that were not sent can be sent from there later, with `wandb sync`.
        folder = Path(os.environ.get("WANDB_DIR") or (gettempdir() if is_remote(folder) else folder))
        make_folder(folder)
        run = self._wandb.init(
            id=described.id,
            resume="allow",
            project=described.project,
            name=described.name,
            config=dict(described.spec),
            dir=folder,
            settings=self._wandb.Settings(**_SETTINGS),
        )
        # wandb's own step counter never decreases, so wandb would drop the points of repeated steps.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run
