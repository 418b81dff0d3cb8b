"""The training loop."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext

import torch.distributed as dist

from train_loop.checkpoint.restore import restore
from train_loop.checkpoint.save import Saver
from train_loop.checkpoint.schedule import SaveSchedule
from train_loop.checkpoint.select import prove_newest
from train_loop.checkpoint.state_dict import draft_manifest, tensors_to_save
from train_loop.data.dataset import Dataset, Rows
from train_loop.data.stream.local import StreamPlan
from train_loop.errors import CheckpointError, UserError
from train_loop.faults.nonfinite import count_skips
from train_loop.faults.out_of_memory import memory_watched
from train_loop.faults.preemption import PreemptionWatch
from train_loop.faults.watchdog import Watchdog, watched
from train_loop.liveness.heartbeat import Phase
from train_loop.loop.batch import StepBatch, check_samples, check_vocabulary, micro_batches, share_rows
from train_loop.loop.build import Run, build_run
from train_loop.loop.coordination import MOVE, RankRequests, StopSignal, agree, agree_on_stop, who_works
from train_loop.loop.evaluate import Evaluation, evaluate
from train_loop.loop.metrics import measure, record_start, record_step, write_line
from train_loop.loop.profiling import profiled
from train_loop.loop.session import Session
from train_loop.loop.step import StepResult, train_step
from train_loop.run_dir import Outcome, Stop, storage_failed
from train_loop.spec import JobSpec
from train_loop.system.gc import collect_garbage, keep_what_is_there, no_garbage_collection
from train_loop.system.retry import retry_storage
from train_loop.telemetry.timers import StepTimer

log = logging.getLogger(__name__)


def train(spec: JobSpec, session: Session, dataset: Dataset, evaluation: Dataset | None = None) -> Outcome:
    """Train this rank's share of a run, from its newest checkpoint to its end or a stop request."""
    model = spec.model.path or (spec.model.config or {})["model_type"]
    log.info("rank %d of %d: building %s", session.rank, session.world, model)
    session.journal.event("workers_ready", world=session.world)
    with watched(session) as watchdog, memory_watched(spec, session):
        run = build_run(spec, session, dataset, evaluation)
        saver = Saver(session.access, spec.checkpoint, spec.strategy.save_mode, timeout=session.timeout)
        with no_garbage_collection():
            resume(run)
            keep_what_is_there()
            record_start(run, who_works())
            try:
                stop = loop(run, saver, watchdog)
            except UserError:
                # Keep the checkpoint in flight: it precedes the user's error.
                saver.wait()
                raise
    session.mark(run.state.step, Phase.END)
    if stop is not None and stop.checkpoint:
        session.journal.event("stopping", mode=stop.mode, waits_for=f"the checkpoint of step {run.state.step}")
    save_failure = close(saver, stop)
    if session.proves_pauses and stop is not None and stop.mode != "cancel" and stop.checkpoint:
        prove_newest(session.access)
    outcome = Outcome(result=stop.result if stop else "succeeded", step=run.state.step, reason=save_failure)
    session.journal.event("training_ended", **outcome.model_dump(exclude_none=True))
    # The driver reads the event as soon as the workers are gone.
    retry_storage(session.journal.flush, seconds=session.patience, may_pass=storage_failed)
    log.info("%s at step %d", outcome.result, outcome.step)
    return outcome


def loop(run: Run, saver: Saver, watchdog: Watchdog) -> Stop | None:
    """Train until the run is done or must stop. Return the stop request; the last checkpoint may still be in flight."""
    state, training, stop, measured = run.state, run.spec.training, None, dict[str, float]()
    times, watch = SaveSchedule(run.spec.checkpoint, step=state.step), PreemptionWatch(run.session)
    sign = StopSignal(run.session)
    left = StreamPlan(run.dataset, run.order, state.consumed, run.order.steps_left(state.consumed))
    rows = run.session.open_stream(left, run.mesh.plan, run.mesh.rank)
    clock, mark = StepTimer(), run.session.mark
    stop = finish_evaluation(run, sign)
    while stop is None and not run.done:
        watchdog.feed()
        clock.begin()
        mark(state.step + 1, Phase.DATA)
        batch = next_batch(run, rows, clock)
        clock.data_arrived()
        mine = rank_requests(sign, times, watch, saver)
        mark(state.step + 1, Phase.AGREE)
        agreed = agree(batch, clock, mine, run.mesh, run.ordered)
        stop = agreed.stop
        if agreed.fatal:
            saver.raise_fatal()
        if stop is not None:
            break

        # ------------------------------------------------------------------------------------------ hot path
        mark(state.step + 1, Phase.TRAIN)
        profile = profiled(state.step + 1, run.session, steps=training.profile_steps, device=run.mesh.device)
        with profile, clock.training(run.timer):
            micro = micro_batches(batch, training.per_device_train_batch_size, state.model, run.mesh)
            result = train_step(state, run.loss, micro, agreed.divisor, training.max_grad_norm, run.ordered)
        state.advance(tokens=agreed.tokens, samples=run.order.global_batch)
        # --------------------------------------------------------------------------------------------------------

        mark(state.step, Phase.AFTER)
        prove(run, result)
        # An evaluation, if due; its results go to the metrics line of its step.
        with clock.waiting():
            evaluation, stop = evaluate_if_due(run, sign)
        state.losses.add(result.loss)
        measured = measure(state.losses.mean, result, evaluation)
        # A cancelled run is not resumed.
        record_step(run, result, clock, agreed, evaluation, resumes=stop is not None and stop.mode != "cancel")
        if stop is not None:
            break
        collect_garbage(state.step)
        # A checkpoint, if due. A save is collective: either all ranks save or none does.
        if times.due(state.step) or agreed.save or (agreed.check_preemption and watch.sees_news()):
            times.begin(state.step)
            mark(state.step, Phase.SAVE)
            save(run, saver, measured, clock)
            run.session.expect_restart()
    if times.saved < state.step and (stop.checkpoint if stop else run.spec.checkpoint.save_final):
        mark(state.step, Phase.SAVE)
        save(run, saver, measured, clock)
    return stop


def resume(run: Run) -> None:
    """Load the newest checkpoint that verifies, or that of the run's parent, or start afresh. A collective call."""
    restore(run.state, run.session.access, run.order.order, seed=run.spec.training.seed, parent=run.parent)


def rank_requests(sign: StopSignal, times: SaveSchedule, watch: PreemptionWatch, saver: Saver) -> RankRequests:
    """Return this rank's requests to all ranks before a step."""
    first = dist.get_rank() == 0
    stop = sign.seen or (MOVE if first and watch.wants_to_move() else None)
    save = first and (times.overdue or watch.wants_last_save())
    return RankRequests(stop, save=save, check_preemption=first and watch.overdue, fatal=saver.failed_fatally)


def next_batch(run: Run, rows: Iterator[Rows | None], clock: StepTimer) -> StepBatch:
    """Return this data rank's samples of the next step, identical on all ranks of a Ulysses group."""
    read = next(rows)
    check_vocabulary(read, run.loss.anatomy.vocabulary)
    with clock.waiting():
        batch = share_rows(read, count=run.order.per_rank, dataset=run.dataset, mesh=run.mesh)
    check_samples(batch, run.order.step(run.state.consumed)[run.mesh.data_rank])
    return batch


def prove(run: Run, result: StepResult) -> None:
    """Check the finished step: count non-finite steps and report recompilations."""
    count_skips(run.state, result, run.spec.training, run.session.journal)
    # Graph breaks and repeated compilations slow training silently.
    if run.watch is not None and (news := run.watch.news()):
        run.session.journal.event("compiled", step=run.state.step, **news)


def evaluate_if_due(run: Run, sign: StopSignal) -> tuple[Evaluation | None, Stop | None]:
    """Evaluate every eval_steps steps and at the run's end. A collective call.

    Return the evaluation, or the stop request that has interrupted it; neither if it is not due.
    """
    every = run.spec.training.eval_steps
    if every is None or (run.state.step % every and not run.done):
        return None, None
    return evaluate_now(run, sign)


def evaluate_now(run: Run, sign: StopSignal) -> tuple[Evaluation | None, Stop | None]:
    """Return the evaluation, or the stop request that has interrupted it. A collective call.

    It uses the averaged weights if the run has an EMA.
    """
    assert run.evaluation is not None, "a spec with eval_steps has eval data"
    stop: Stop | None = None

    def stops() -> bool:
        nonlocal stop
        stop = agree_on_stop(sign.seen)
        return stop is not None

    size, in_order = run.spec.training.per_device_train_batch_size, run.ordered is not None
    with run.state.ema.applied() if run.state.ema is not None else nullcontext():
        found = evaluate(run.loss, run.evaluation, run.mesh, per_device=size, in_order=in_order, stops=stops)
    if found is not None:
        log.info("evaluated: loss %.4f, perplexity %.2f, %.2f s", found.loss, found.perplexity, found.seconds)
    return found, stop


def finish_evaluation(run: Run, sign: StopSignal) -> Stop | None:
    """Evaluate the newest step if a stop request has interrupted that. Return the request if one does so again."""
    if not run.state.unlogged_line:
        return None
    evaluation, stop = evaluate_now(run, sign)
    if stop is None:
        write_line(run, run.state.unlogged_line, evaluation)
        run.state.unlogged_line = {}
    return stop


def save(run: Run, saver: Saver, measured: dict[str, float], clock: StepTimer) -> None:
    """Start saving a checkpoint of this step."""
    with clock.saving():
        draft = draft_manifest(
            run.state, run.order.order, measured, spec=run.spec, mesh=run.mesh.plan, token=run.session.token
        )
        saver.save(tensors_to_save(run.state), draft, clock)
    log.info("saving a checkpoint of step %d", run.state.step)


def close(saver: Saver, stop: Stop | None) -> str | None:
    """Wait for the last save. Raise its error, unless the run is being cancelled: then return the error's text."""
    try:
        saver.close()
    except CheckpointError as error:
        if stop is None or stop.mode != "cancel":
            raise
        return str(error)
    return None
