"""What Ray Train's controller unpickles: it starts in a second less without the imports that only ranks need."""

import logging
import pkgutil
from typing import Any

from ray.train import UserCallback

from train_loop.failure import reason
from train_loop.journal import Journal
from train_loop.run_dir import AttemptDir, expect_run_dir, list_folder, size_of

log = logging.getLogger(__name__)


class TellOfLosses(UserCallback):  # type: ignore[misc]
    """Writes an event when workers die, while Ray Train starts the group again."""

    def __init__(self, attempt: AttemptDir) -> None:
        self.attempt = attempt

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by Ray Train's controller."""
        try:
            self._tell(worker_exceptions)
        except Exception as error:
            # What is raised here would end the attempt with another error than the workers'.
            log.warning("the loss of workers could not be reported: %s", error)

    def _tell(self, worker_exceptions: dict[int, Exception]) -> None:
        expect_run_dir(self.attempt.root.parent.parent)
        # Peers of a dead worker fail of lost connections; the dead one is the news.
        dead = [rank for rank, error in worker_exceptions.items() if hasattr(error, "health_check_failure")]
        ranks = sorted(dead or worker_exceptions)
        hung = self._hung()
        told = {"stacks": [f"{self.attempt.stacks.name}/{name}" for name in sorted(hung)]} if hung else {}
        Journal(self.attempt).event("workers_lost", ranks=ranks, error=reason(worker_exceptions[ranks[0]]), **told)

    def _hung(self) -> list[str]:
        """Return the files of stacks that are not empty; none while storage is away."""
        try:
            return [name for name in list_folder(self.attempt.stacks) if size_of(self.attempt.stacks / name)]
        except Exception as error:
            log.warning("stacks cannot be listed: %s", error)
            return []


def work(config: dict[str, Any]) -> None:
    """One worker."""
    pkgutil.resolve_name("train_loop.rank:work")(config)
