"""Handling of steps whose loss or gradients are not finite."""

from train_loop.errors import NonFiniteError
from train_loop.loop.step import StepResult
from train_loop.spec import TrainingSpec
from train_loop.state import TrainState
from train_loop.telemetry.event_log import EventLog


def count_skips(state: TrainState, result: StepResult, training: TrainingSpec, journal: EventLog) -> None:
    """Count consecutive skipped steps. Raises NonFiniteError if the spec ends the run after them.

    All ranks have the same result and count: either all raise or none does.
    """
    if result.overflow:
        # The scaler lowers its factor after an overflow: the step does not count as non-finite.
        journal.event("loss_scale_lowered", step=state.step, loss_scale=state.scaler.get_scale())
        return
    state.skipped = 0 if result.applied else state.skipped + 1
    if result.applied:
        return
    numbers = {"step": state.step, "loss": result.loss, "grad_norm": result.grad_norm}
    journal.event("step_skipped", **numbers, in_a_row=state.skipped)
    message = f"{', '.join(f'{name}={value}' for name, value in numbers.items())} is not finite"
    if training.on_nonfinite == "fail":
        raise NonFiniteError(f"{message}; lower learning_rate, or choose on_nonfinite: skip")
    if state.skipped >= training.max_consecutive_skips:
        raise NonFiniteError(
            f"{message}, and max_consecutive_skips={training.max_consecutive_skips} steps were skipped in a row; lower "
            "learning_rate, check the data of these steps, or start from finite weights"
        )
