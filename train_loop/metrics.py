"""What every optimizer step is measured by."""

import logging
from collections import deque
from dataclasses import asdict
from time import perf_counter

from train_loop.assemble import Run
from train_loop.data.order import PADDING
from train_loop.evaluate import Evaluation
from train_loop.run_dir import RunDir, read_lines
from train_loop.step import StepResult

log = logging.getLogger(__name__)


class StepClock:
    """Times one step from its first wait for data."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self.data_wait_seconds = 0.0

    def data_arrived(self) -> None:
        """The rows of the step are here."""
        self.data_wait_seconds = perf_counter() - self._start

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return perf_counter() - self._start


def record_step(
    run: Run, result: StepResult, clock: StepClock, *, tokens: int, evaluation: Evaluation | None = None
) -> None:
    """Write the metrics line of the step that has just been counted, if it is one that is logged."""
    state, training = run.state, run.spec.training
    if state.step % training.logging_steps and not run.done and evaluation is None:
        return
    seconds = clock.seconds - (evaluation.seconds if evaluation else 0.0)
    log.info("step %d of %d: loss %.4f, %.2f s", state.step, run.steps, result.loss, seconds)
    run.journal.metrics(
        step=state.step,
        tokens=state.tokens,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        tokens_per_second=tokens / seconds,
        step_seconds=seconds,
        data_wait_seconds=clock.data_wait_seconds,
        **({f"eval_{name}": value for name, value in asdict(evaluation).items()} if evaluation else {}),
        **({"samples": _samples_of_step(run)} if training.audit_samples else {}),
    )


def _samples_of_step(run: Run) -> list[int]:
    """The sample ids of the step before the present position; every rank has held its own rows against them."""
    ids: list[int] = run.order.step(run.state.consumed - run.order.global_batch).flatten().tolist()
    return sorted(sample for sample in ids if sample != PADDING)


def replayed_steps(run_dir: RunDir, resumed_from: int) -> int:
    """How many logged steps a run that resumes from here has to do again."""
    for attempt in reversed(run_dir.attempts()):
        last = deque(read_lines(attempt.metrics), maxlen=1)
        if last:
            return max(int(last[0]["step"]) - resumed_from, 0)
    return 0
