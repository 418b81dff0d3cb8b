"""Metrics lines and the event `training_started`."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from train_loop.data.order import PADDING
from train_loop.loop.build import Run
from train_loop.loop.coordination import Agreement, gather_stats, warn_of_hosts
from train_loop.loop.evaluate import Evaluation
from train_loop.loop.objectives.routed import IDLE_STEPS, RoutedLoss
from train_loop.loop.step import StepResult
from train_loop.optim import describe_groups
from train_loop.run_dir import RunDir, read_lines
from train_loop.telemetry.timers import RankStats, StepTimer

_NAMED = 3
"""Experts that a warning names."""

log = logging.getLogger(__name__)


def record_start(run: Run, workers: list[dict[str, Any]]) -> None:
    """Write `training_started` with workers, sizes and settings, and warn about slow or unreachable settings."""
    log.info("training on %s from step %d of %d", run.mesh.plan.axes, run.state.step, run.steps)
    if isinstance(run.objective, RoutedLoss):
        run.objective.idle.begin = run.state.step
    run.session.journal.event(
        "training_started",
        workers=workers,
        resumed_from=run.state.step,
        # Only rank 0 writes the event.
        replayed=replayed_steps(run.session.run_dir, run.state.step) if run.mesh.rank == 0 else 0,
        steps=run.steps,
        ends_by=run.ends_by,
        samples=run.dataset.samples,
        global_batch=run.order.global_batch,
        world=run.session.world,
        mesh=run.mesh.plan.axes,
        parameter_groups=describe_groups(run.state.optimizers),
        mfu=run.flops.stated(),
    )
    warn_of_hosts(run.mesh.plan, workers, run.session.journal)
    late = [step for step in run.spec.training.profile_steps if step > run.steps]
    if late:
        about = "about " if run.spec.training.max_tokens else ""
        run.session.journal.warn(
            f"profile_steps={late} are beyond the {about}{run.steps} steps of the run; later steps are not profiled"
        )


def record_step(
    run: Run,
    result: StepResult,
    clock: StepTimer,
    agreed: Agreement,
    evaluation: Evaluation | None = None,
    *,
    resumes: bool = False,
) -> dict[str, Any] | None:
    """Write and return the metrics line of the finished step, if logging_steps or an evaluation asks for it.

    A collective call. Returns None if no line is due.

    Its loss is the mean since the last line of logging_steps; lines of evaluations do not reset it. A run that
    `resumes` after a stop request has interrupted its evaluation keeps the line in its state, and writes it then.
    """
    state, training = run.state, run.spec.training
    due = not state.step % training.logging_steps or run.done
    # Identical on all ranks: the collective call below needs all of them.
    if not due and evaluation is None and not resumes:
        return None
    loss = state.losses.mean
    if due:
        state.losses.clear()
    seconds = clock.seconds - (evaluation.seconds if evaluation else 0.0)
    per_worker = agreed.tokens / seconds / run.session.world
    ranks = gather_stats(clock.take_vitals(run.mesh.device), run.mesh)
    log.info("step %d of %d: loss %.4f, %.2f s", state.step, run.steps, loss, seconds)
    line = dict[str, Any](
        step=state.step,
        tokens=state.tokens,
        loss=loss,
        grad_norm=result.grad_norm,
        lr=result.rates[0],
        **({"lr_groups": [*result.rates]} if state.rates_differ else {}),
        tokens_per_second=agreed.tokens / seconds,
        tokens_per_second_per_worker=per_worker,
        mfu=run.flops.mfu(tokens=per_worker, rows=_rows_of_step(run) / seconds / run.session.world),
        step_seconds=seconds,
        data_wait_seconds=clock.data_wait_seconds,
        checkpoint_blocked_seconds=clock.take_saving_seconds(),
        **_ranks(ranks),
        **_peaks(ranks),
        **({"loss_scale": state.scaler.get_scale()} if state.scaler.is_enabled() else {}),
        **({"samples": _samples_of_step(run)} if training.audit_samples else {}),
        **result.means,
        **_loads(run),
    )
    if resumes:
        state.unlogged_line = line
    else:
        write_line(run, line, evaluation)
    return line


def write_line(run: Run, line: Mapping[str, Any], evaluation: Evaluation | None) -> None:
    """Write a metrics line with the results of an evaluation, if there was one."""
    found = {} if evaluation is None else _prefixed(evaluation) | {"eval_seconds": evaluation.seconds}
    run.session.journal.metrics(**line, **found)


def measure(loss: float, result: StepResult, evaluation: Evaluation | None) -> dict[str, float]:
    """Return the values by which checkpoints are compared; `loss` is the mean since the last logged line."""
    found = {} if evaluation is None else _prefixed(evaluation)
    evaluated = {name: value for name, value in found.items() if isinstance(value, float)}
    return {"loss": loss, "grad_norm": result.grad_norm, **evaluated}


def _prefixed(evaluation: Evaluation) -> dict[str, float | int]:
    return {f"eval_{name}": value for name, value in evaluation.metrics.items()}


def _ranks(ranks: Sequence[RankStats]) -> dict[str, Any]:
    """Return each rank's own seconds since the last line, and the slowest rank, for which the others waited."""
    seconds = [round(rank.own_nanoseconds / 1e9, 6) for rank in ranks]
    slowest = seconds.index(max(seconds))
    return {"slowest_rank": slowest, "slowest_rank_seconds": seconds[slowest], "rank_seconds": seconds}


def _loads(run: Run) -> dict[str, Any]:
    """Return the load of each layer's busiest expert over the mean, and warn of experts without tokens.

    A collective call.
    """
    routed = run.objective
    if not isinstance(routed, RoutedLoss):
        return {}
    loads = routed.watch.take_loads()
    if late := routed.idle.news(loads, step=run.state.step):
        named = ", ".join(f"{expert} of layer {layer}" for layer, expert in late[:_NAMED])
        run.session.journal.warn(
            f"{len(late)} experts got no token in {IDLE_STEPS} steps, for example {named} (counting layers with "
            f"experts); {routed.remedy}"
        )
    means = [sum(experts) / len(experts) for experts in loads]
    return {"expert_load": [round(max(one) / mean, 3) if mean else 0.0 for one, mean in zip(loads, means, strict=True)]}


def _peaks(vitals: Sequence[RankStats]) -> dict[str, Any]:
    """Return the highest peak memory of all ranks."""
    return {
        "peak_device_bytes": max(rank.device_bytes for rank in vitals) or None,
        "peak_host_bytes": max(rank.host_bytes for rank in vitals),
    }


def _samples_of_step(run: Run) -> list[int]:
    """Return the sample ids of the finished step; each rank has checked its own rows against them."""
    ids: list[int] = run.order.step(run.state.consumed - run.order.global_batch).flatten().tolist()
    return sorted(sample for sample in ids if sample != PADDING)


def _rows_of_step(run: Run) -> int:
    """Return the number of samples of the finished step; the last step of a run may have fewer than a batch."""
    return run.order.global_batch - max(run.state.consumed - run.order.order.end, 0)


def replayed_steps(run_dir: RunDir, resumed_from: int) -> int:
    """Return the number of logged steps that a run resuming at `resumed_from` repeats."""
    for attempt in reversed(run_dir.attempts()):
        last = deque(read_lines(attempt.metrics), maxlen=1)
        if last:
            return max(int(last[0]["step"]) - resumed_from, 0)
    return 0
