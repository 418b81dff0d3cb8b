"""What Ray Train's controller unpickles: it starts in a second less without the imports that only ranks need."""

import pkgutil
from typing import Any

from ray.train import UserCallback

from train_loop.failure import reason
from train_loop.journal import Journal
from train_loop.run_dir import AttemptDir, list_folder, size_of


class TellOfLosses(UserCallback):  # type: ignore[misc]
    """Writes an event when workers die, while Ray Train starts the group again."""

    def __init__(self, attempt: AttemptDir) -> None:
        self.attempt = attempt

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by Ray Train's controller."""
        # Peers of a dead worker fail of lost connections; the dead one is the news.
        dead = [rank for rank, error in worker_exceptions.items() if hasattr(error, "health_check_failure")]
        ranks = sorted(dead or worker_exceptions)
        hung = [name for name in list_folder(self.attempt.stacks) if size_of(self.attempt.stacks / name)]
        told = {"stacks": [f"{self.attempt.stacks.name}/{name}" for name in sorted(hung)]} if hung else {}
        Journal(self.attempt).event("workers_lost", ranks=ranks, error=reason(worker_exceptions[ranks[0]]), **told)


def work(config: dict[str, Any]) -> None:
    """One worker."""
    pkgutil.resolve_name("train_loop.rank:work")(config)
