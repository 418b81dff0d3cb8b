"""Weights & Biases: a run of the account, or of the folder, that WANDB_API_KEY and WANDB_MODE name."""

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
    # Of the driver's machine, where nothing is trained.
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandB:
    """The run that has the job's id as its own, gone on with by every attempt.

    wandb's own process keeps what it is given in a file, and sends it when it can; nobody can have it do so at once.
    """

    # It does every 15 s, and ends at once with a driver that is killed.
    settle_seconds = 30.0

    def __init__(self, described: Description, folder: Path) -> None:
        # Nobody is told of our users.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            # The one place of an optional dependency, which takes seconds to import.
            import wandb  # noqa: PLC0415
        except ImportError as error:
            raise cannot_import("wandb", error) from error
        self._wandb = wandb
        try:
            self._run = self._begin(described, folder)
        except Exception:
            # Its process would take a run that could not begin for one that is in use, for ever.
            wandb.teardown()
            raise

    def write(self, points: Sequence[Point]) -> None:
        """Give them to wandb's process."""
        for point in points:
            self._run.log({"step": point.step, "_timestamp": point.time, **point.scalars})

    def close(self, outcome: Outcome | None) -> None:
        """Have all of it sent, and the run marked as finished, or as failed."""
        try:
            self._run.finish(exit_code=1 if outcome is not None and outcome.result == "failed" else 0)
        finally:
            self._wandb.teardown()

    def _begin(self, described: Description, folder: Path) -> Any:
        # What was not sent can be sent from there later, with `wandb sync`.
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
        # Its own count of steps never goes back, and would have it drop those that were done again.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run
